"""Tests the points of a sweep, and what is refused before the first point runs."""

from collections.abc import Callable
from pathlib import Path

import pytest

from brt import command_line, sweep
from brt.errors import ConfigError
from brt.layers.sections import Recurrence
from brt.sweeping import points

from .conftest import ROOT, RUN, Sweeps

SWEEPS = sorted((ROOT / "configs/sweeps").glob("*.gin"))
Names = Callable[..., list[str]]


def expanded(sweeps: Sweeps, text: str, *flags: str) -> list[points.Point]:
    """Returns the points of a sweep, which is given as text of a .gin file."""
    sweeps.write(text)
    args = sweep.parser().parse_args(["--gin_file=sweep.gin", *flags])
    bound, resolve = command_line.section_and_variant_resolver(args, "Sweep")
    return points.expand(points.from_bindings(bound), resolve)


def test_a_grid_is_every_combination_the_last_field_fastest(names: Names) -> None:
    assert names(
        "Recurrence.layers = (0,)\n"
        "Sweep.grid = {'Recurrence.gate': ('fixed', 'lstm'), 'Training.seed': (0, 1)}"
    ) == ["gate=fixed,seed=0", "gate=fixed,seed=1", "gate=lstm,seed=0", "gate=lstm,seed=1"]


def test_more_points_than_anybody_runs_are_refused_at_once(names: Names) -> None:
    seeds, states = (tuple(range(first, 200)) for first in (0, 1))
    many = f"Sweep.grid = {{'Training.seed': {seeds}, 'Recurrence.states': {states}}}"
    with pytest.raises(ConfigError, match="the sweep has 39,800 points, more than 10,000"):
        names(many)
    with pytest.raises(ConfigError, match="the sweep has 1,000,000,000 points"):
        names(
            "Sweep.random = {'Optimizer.learning_rate': ('uniform', 1e-4, 1e-2)}\n"
            "Sweep.samples = 1000000000"
        )


def test_named_points_take_files_bindings_and_the_grid(sweeps: Sweeps) -> None:
    (sweeps.directory / "rec.gin").write_text(
        "Recurrence.layers = (-1,)\nRecurrence.states = 32\nTraining.steps = 99"
    )
    text = """
Sweep.points = (
    {'name': 'Slide'},
    {'name': 'Rec:fixed', 'include': 'rec.gin', 'Model.window': 4},
)
Sweep.grid = {'Training.seed': %SEEDS}
SEEDS = (0, 1)
"""
    found = expanded(sweeps, text)
    assert [point.name for point in found] == [
        "Slide,seed=0", "Slide,seed=1", "Rec:fixed,seed=0", "Rec:fixed,seed=1",
    ]  # fmt: skip
    assert [point.directory for point in found][2] == "Rec-fixed,seed=0"
    assert [point.group for point in found] == ["Slide", "Slide", "Rec:fixed", "Rec:fixed"]
    rec = found[3].config
    assert (rec.model.of(Recurrence).layers, rec.model.window, rec.training.seed) == ((-1,), 4, 1)
    assert (rec.model.of(Recurrence).states, rec.training.steps) == (8, 5), (
        "the sweep file beats what is included"
    )
    assert found[3].bindings == {
        "Recurrence.layers": (-1,), "Model.window": 4, "Training.seed": 1,
    }  # fmt: skip
    assert len(expanded(sweeps, text, "--gin_bindings=SEEDS = (3,)")) == 2


def test_a_point_has_seeds_of_its_own(names: Names) -> None:
    written = "Sweep.points = ({'name': 'A', 'seeds': (1, 2)}, {'name': 'B'})\n"
    own = ["A,seed=1", "A,seed=2"]
    assert names(written) == [*own, "B"]
    assert names(written + "Sweep.grid = {'Training.seed': (0,)}\n") == [*own, "B,seed=0"]


def test_the_command_line_changes_the_base_and_what_is_not_varied(sweeps: Sweeps) -> None:
    for seed in (1, 2):
        (sweeps.directory / f"base{seed}.gin").write_text(f"Optimizer.clip_norm = {seed}.0")
    text = "Sweep.base = 'base1.gin'\nSweep.grid = {'Training.seed': (0, 1)}"
    assert expanded(sweeps, text)[0].config.optimizer.clip_norm == 1
    flags = ["--gin_bindings=Sweep.base = 'base2.gin'", "--gin_bindings=Training.steps = 7"]
    changed = expanded(sweeps, text, *flags)[1].config
    assert (changed.optimizer.clip_norm, changed.training.steps) == (2, 7)


def test_random_samples_depend_on_the_seed_of_the_sweep_only(sweeps: Sweeps) -> None:
    def rates(samples: int, seed: int = 0, more: str = "") -> list[float]:
        text = f"""
Sweep.random = {{'Optimizer.learning_rate': ('log_uniform', 1e-4, 1e-2){more}}}
Sweep.samples = {samples}
Sweep.seed = {seed}
"""
        return [p.config.optimizer.learning_rate for p in expanded(sweeps, text)]

    first = rates(4)
    assert len(set(first)) == 4 and all(1e-4 <= rate <= 1e-2 for rate in first)
    assert rates(6)[:4] == first, "more samples leave the first ones as they are"
    more = ", 'Recurrence.states': ('integer', 1, 64), 'Recurrence.gate': ('choice', 'gru', 'lstm')"
    assert rates(4, more=more) == first
    assert rates(4, seed=1) != first
    assert first == [float(f"{rate:.4g}") for rate in first], "names stay readable"


def test_names_are_short_and_fit_for_file_systems(names: Names) -> None:
    assert names("Sweep.grid = {'Recurrence.layers': ((), (0, -1))}") == [
        "recurrent_layers=none",
        "recurrent_layers=0+-1",
    ]
    assert names(
        "Sweep.grid = {'Evaluation.batch_size': (2,), 'Training.batch_size': (2, 4), "
        "'Optimizer.learning_rate': (1, 1e-05)}"
    )[1] == ("Evaluation.batch_size=2,Training.batch_size=2,learning_rate=1e-05")
    assert names("Sweep.grid = {'MLP.bias': (True,), 'SelfAttention.bias': ('all',)}") == [
        "mlp_bias=True,self_attention_bias=all"
    ]
    assert names("Sweep.points = ({'name': 'a/b: \"c\"'},)") == ["a-b-c"]
    grid = {"Logging.wandb_project": ("\x1b[2J", "a\nb")}
    assert all(name.isprintable() for name in names(f"Sweep.grid = {grid!r}"))
    long = [f"{'x' * 200}{i}" for i in range(2)]
    found = names(f"Sweep.grid = {{'Logging.wandb_project': {tuple(long)}}}")
    assert len(set(found)) == 2 and all(len(name) <= 96 for name in found)
    assert found == names(f"Sweep.grid = {{'Logging.wandb_project': {tuple(long)}}}"), "stable"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the sweep has no points; bind Sweep.grid, Sweep.points or Sweep.random"),
        ("Sweep.grid = {}", "the sweep has no points"),
        ("Sweep.grid = {'Training.seed': ()}", "Training.seed = () is empty"),
        ("Sweep.grid = {'Training.seed': 3}", "Training.seed = 3 must be a tuple; write (3,)"),
        (
            "Sweep.grid = {'Model.gat': (1,)}",
            "no field 'Model.gat'; did you mean 'Recurrence.gate'?",
        ),
        (
            "Sweep.grid = {'Recurrence.gate': ('lsmt',)}",
            "must be one of 'fixed', 'lstm', 'gru'; did",
        ),
        ("Sweep.grid = {'Training.steps': (1.0,)}", "Training.steps = 1.0 must be an int; write 1"),
        ("Sweep.grid = {'Training.seed': (0, 0)}", "two points are named 'seed=0'"),
        ("Sweep.points = ({'name': 'a'}, {'name': 'a'})", "two points are named 'a'"),
        ("Sweep.points = ({'name': 'a/b'}, {'name': 'A-b'})", "would share the directory"),
        ("Sweep.points = ({'name': 'a'}, {'name': 'b'})", "'a' and 'b' are the same run"),
        ("Sweep.points = ({'name': 'plots'},)", "a point cannot be named 'plots'"),
        ("Sweep.points = ({'Model.window': 8},)", "must be a dictionary with a 'name' in quotes"),
        ("Sweep.points = ({'name': 'a', 'window': 8},)", "a has no section 'window'"),
        ("Sweep.points = ({'name': 'a', 'include': 3},)", "a: include = 3 must be a tuple of str"),
        ("Sweep.points = ({'name': 'a', 'include': 'x.gin'},)", "include 'x.gin': no such file"),
        ("Sweep.points = ({'name': 'a', 'include': 'sweep.gin'},)", "in a circle"),
        ("Sweep.random = {'Training.seed': ('integer', 0, 9)}", "Sweep.samples = 0 says how often"),
        ("Sweep.random = {'Training.seed': ('uniform', 0, 9)}", "uniform draws floats, which"),
        ("Sweep.random = {'Model.dropout': ('uniform', 1, 0)}", "a lower and a higher bound"),
        ("Sweep.random = {'Model.dropout': ('log_uniform', 0, 1)}", "needs bounds above 0"),
        ("Sweep.random = {'Model.dropout': ('loguniform', 0, 1)}", "did you mean 'log_uniform'?"),
        ("Sweep.gird = {'Training.seed': (0,)}", "'Sweep.gird'; did you mean 'Sweep.grid'?"),
        ("Sweep.split = 'valid'", "must be one of 'train', 'validation', 'test'"),
        ("Sweep.grid = {'Training.seed': (0,)}\nSweep.baseline = 'XL'", "'XL' is no point"),
        (
            "Sweep.points = ({'name': 'A', 'seeds': (0,), 'Training.seed': 1},)",
            "the point 'A' has seeds and Training.seed; keep one",
        ),
        ("Sweep.grid = {'Training.seed': %SEED}", "uses %SEED, which is not defined"),
        ("Sweep.grid = {'Training.seed': (0,), 'Training.seed': (1,)}", "is there twice"),
        ("Sweep.grid = {'Training.seed': (0,)}\nSweep.grid = {}", "Sweep.grid is bound twice"),
        ("Sweep.grid = {'Recurrence.layers': ((0,), (2,))}", "recurrent_layers=2: "),
        ("Sweep.grid = {'Model.feedback': (True,)}", "needs a recurrent layer"),
        (
            "Sweep.points = ({'name': 'a', 'Model.window': 4},)\n"
            "Sweep.grid = {'Model.window': (8,)}",
            "Model.window is in Sweep.grid and in the point 'a'; keep one",
        ),
        (
            "Sweep.grid = {'Memorizing.layers': ((0,),), 'Memorizing.size': (8,), "
            "'Memorizing.neighbors': (8,)}",
            "Memorizing.size = 8 must not be below",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(
    text: str, said: str, sweeps: Sweeps
) -> None:
    assert said in sweeps.refusal(text, error=ConfigError)


def test_refusals_name_the_file_the_line_and_the_point(sweeps: Sweeps) -> None:
    line = RUN.count("\n") + 1
    message = sweeps.refusal("Sweep.grid = {'Model.gat': (1,)}")
    assert message.startswith(f"sweep.gin:{line}: Sweep.grid has no field 'Model.gat'")
    message = sweeps.refusal("Sweep.grid = {'Recurrence.layers': ((0,), (2,))}")
    assert message.startswith("point recurrent_layers=2: Recurrence.layers = (2,) names layer")
    assert f"Recurrence.layers set at sweep.gin:{line}" in message


GRID = "Sweep.grid = {'Training.seed': (0, 1)}"


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--jobs=0", "--jobs=0 must be at least 1"),
        ("--array_index=2", "--array_index=2 is no point of this sweep, which has 0 to 1"),
        ("--array_index=-1", "--array_index=-1 is no point"),
        ("--gin_bindings=Training.seed = 1", "binds Training.seed, and so does sweep.gin:"),
        ("--gin_bindings=Model.gat = 1", "no field 'Model.gat'"),
        ("--report", "--workdir=out does not exist, so there is nothing to report"),
        ("--slurm=gpu", "'gpu' is no option of sbatch"),
    ],
)
def test_flags_that_make_no_sense(flag: str, said: str, sweeps: Sweeps) -> None:
    assert said in sweeps.refusal(GRID, flag, error=ConfigError)


@pytest.mark.slow_cases("summarization*", "speech*", "gates", "placement", "sentences_small")
@pytest.mark.parametrize("file", SWEEPS, ids=lambda file: file.stem)
def test_every_sweep_that_comes_with_brt_has_points(file: Path, sweeps: Sweeps) -> None:
    sweeps("--list", f"--gin_file={file}")


def test_a_sweep_is_no_run(sweeps: Sweeps) -> None:
    sweeps.write(GRID)
    args = sweep.parser().parse_args(["--gin_file=sweep.gin"])
    with pytest.raises(ConfigError, match="Sweep.grid describes a sweep; run it with python -m"):
        command_line.resolve(args)
    with pytest.raises(ConfigError, match="--gin_file names the sweep"):
        sweep.main(sweep.parser().parse_args([]))


def test_the_config_of_a_point_is_shown_with_origins(
    sweeps: Sweeps, capsys: pytest.CaptureFixture[str]
) -> None:
    sweeps.write(GRID)
    sweeps("--print_config", "--array_index=1")
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("Training.seed ")]
    assert line.split("#")[0].split() == ["Training.seed", "=", "1"] and "sweep.gin:" in line


@pytest.mark.parametrize("name", ["../x", "/etc/x", "..", ".", "-rf", "~", "x" * 5000, "a/../../b"])
def test_a_point_stays_in_the_directory_of_the_sweep(name: str, sweeps: Sweeps) -> None:
    (point,) = expanded(sweeps, f"Sweep.points = ({{'name': {name!r}, 'Training.seed': 1}},)")
    assert Path(point.directory).name == point.directory
    assert point.directory[0] not in ".-~" and len(point.directory) < 100


@pytest.mark.parametrize("name", ["a\0b", "\x1b[2J", "a\nb", "\u202eb"])
def test_names_that_cannot_be_printed_are_refused(name: str, sweeps: Sweeps) -> None:
    with pytest.raises(ConfigError, match="cannot be printed; rename it") as caught:
        expanded(sweeps, f"Sweep.points = ({{'name': {name!r}, 'Training.seed': 1}},)")
    assert str(caught.value).isprintable()
