"""Tests the report of a sweep on directories that look like those of finished runs."""

import csv
import dataclasses
import json
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from brt.bindings import Resolved
from brt.config import Config, Training
from brt.errors import CheckpointError, ConfigError
from brt.sweeping import job, report
from brt.sweeping.directory import PointDirectory, PointProgress
from brt.sweeping.points import Point, Sweep
from brt.sweeping.report import Group, Row
from brt.training.metrics import MetricsWriter
from brt.training.workdir import create

ARRAYS = {
    "params/embedding": {"shape": [256, 4], "dtype": "float32"},
    "params/layer": {"shape": [3, 5], "dtype": "float32"},
    "optimizer/layer": {"shape": [3, 5], "dtype": "float32"},
}


def point(index: int, group: str, seed: int, task: str = "language_modeling") -> Point:
    config = Config(training=Training(steps=300, seed=seed, task=task))
    name = f"{group},seed={seed}"
    return Point(index, name, name, group, {"Training.seed": seed}, Resolved(config, {}, {}))


def leave(workdir: Path, point: Point, bits: float, seconds: list[float], **progress: str) -> None:
    """Writes the directory of a point after 300 steps, with metrics and an evaluation."""
    directory = PointDirectory(workdir / point.directory)
    directory.write(point, PointProgress(**{"status": "finished", "seconds": 60.0, **progress}))
    writer = MetricsWriter(create(directory.path), 0, print)
    for i, step in enumerate((100, 200, 300)):
        values = {
            "data/tokens": step * 10,
            "train/bits_per_token": 8 - i,
            "perf/step_seconds": seconds[i],
            "perf/tokens_per_second": 10 / seconds[i],
        }
        writer.write(step, values)
    writer.close()
    saved = directory.run.checkpoints / "300"
    saved.mkdir()
    (saved / "MANIFEST.sha256").touch()
    (saved / "meta.json").write_text(json.dumps({"step": 300, "arrays": ARRAYS}))
    evaluation = directory.run.evaluations / "300" / "validation.json"
    evaluation.parent.mkdir()
    evaluation.write_text(json.dumps({"bits_per_byte": bits, "bits_per_token": 4 * bits}))


def evaluated(workdir: Path, point: Point, figures: dict) -> None:
    """Adds figures to the evaluation of a point."""
    path = PointDirectory(workdir / point.directory).evaluation("validation")
    path.write_text(json.dumps(json.loads(path.read_text()) | figures))


def validated(workdir: Path, point: Point, metric: str, values: dict[int, float]) -> None:
    """Adds values of a metric by step to the log of a point's training."""
    with PointDirectory(workdir / point.directory).run.metrics.open("a") as file:
        for step, value in values.items():
            file.write(json.dumps({"step": step, f"eval/validation/{metric}": value}) + "\n")


def begun(tmp_path: Path, task: str = "language_modeling") -> list[Point]:
    """Writes two groups of two points, one of which failed, and returns them with a waiting one."""
    found = [
        point(i, group, seed, task)
        for i, (group, seed) in enumerate(
            [("Slide", 0), ("Slide", 1), ("Rec|skip", 0), ("Rec|skip", 1), ("XL", 0)]
        )
    ]
    leave(tmp_path, found[0], 2.5, [0.5, 0.25, 0.25])
    leave(tmp_path, found[1], 2.25, [0.5, 0.5, 0.5])
    leave(tmp_path, found[2], 2.125, [0.75, 0.75, 1.0])
    leave(tmp_path, found[3], 9.9, [1.0, 1.0, 1.0], status="failed", reason="diverged: step 3")
    return found


@pytest.fixture
def points(tmp_path: Path) -> list[Point]:
    return begun(tmp_path)


def sweep(**fields: str) -> Sweep:
    return Sweep(grid={"Training.seed": (0, 1)}, **fields)


def test_groups_are_exact_means_over_finished_seeds(points: list[Point], tmp_path: Path) -> None:
    rows = report.read(tmp_path, points, "validation")
    assert [row.step_seconds for row in rows] == [0.25, 0.5, 0.75, 1.0, None]
    slide, rec, xl = report.group(rows, "")
    assert (slide.runs, slide.planned, rec.runs, rec.planned) == (2, 2, 1, 2)
    assert slide.metrics == {"bits_per_byte": 2.375, "bits_per_token": 9.5}
    assert rec.metrics["bits_per_byte"] == 2.125, "a failed run has no metric"
    assert (slide.step_seconds, slide.relative_step_time) == (0.375, 1.0)
    assert (rec.step_seconds, rec.relative_step_time) == (0.75, 2.0)
    assert (rec.parameters, rec.parameters_non_embedding) == (1024 + 15, 15)
    assert (xl.runs, xl.metrics, xl.relative_step_time) == (0, {}, None)


@pytest.mark.parametrize("baseline", ["Rec|skip", "Rec|skip,seed=1"])
def test_the_baseline_is_a_group_or_a_point_in_it(
    baseline: str, points: list[Point], tmp_path: Path
) -> None:
    groups = report.group(report.read(tmp_path, points, "validation"), baseline)
    assert [g.relative_step_time for g in groups] == [0.5, 1.0, None]


def test_a_named_point_as_baseline_is_its_first_group(tmp_path: Path) -> None:
    found = [
        point(i, group, 0) for i, group in enumerate(["XL", "Slide,window=8", "Slide,window=4"])
    ]
    groups = report.group(report.read(tmp_path, found, "validation"), "")
    assert report.reference(groups, "Slide").name == "Slide,window=8"
    assert report.reference(groups, "").name == "XL"


def test_the_report_has_a_line_per_group_and_per_point(points: list[Point], tmp_path: Path) -> None:
    table = report.write(tmp_path, points, sweep())
    text = (tmp_path / "report.md").read_text()
    assert table in text
    assert "5 points: 3 finished, 1 failed, 1 waiting." in text
    assert "Metrics are those of all validation data" in text
    cells = [[c.strip() for c in line.split(" | ")] for line in table.splitlines()]
    assert cells[2] == [
        "| Slide", "2", "2.3750", "9.5000", "375.0", "1.00", "10", "30", "1,039", "15 |",
    ]  # fmt: skip
    assert cells[3][:4] == ["| Rec\\|skip", "1 of 2", "2.1250", "8.5000"]
    assert len({line.count("|") - line.count("\\|") for line in table.splitlines()}) == 1
    assert r"- Rec\|skip,seed=1: diverged: step 3 (Rec\|skip,seed=1/output.txt)" in text
    for name in ("bits_against_step_time.png", "bits.png", "training_curves.png"):
        assert f"![{name}](plots/{name})" in text
        pixels = matplotlib.image.imread(tmp_path / "plots" / name)
        assert min(pixels.shape[:2]) > 200
        assert len(np.unique(pixels[..., :3] @ [1, 256, 65536])) > 50


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "draw", lambda *arguments: [])


def test_the_csv_has_every_figure_in_full(
    points: list[Point], tmp_path: Path, no_plots: None
) -> None:
    report.write(tmp_path, points, sweep(baseline="Rec|skip"))
    with (tmp_path / "report.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["Training.seed"] for row in rows] == ["0", "1", "0", "1", "0"]
    assert [row["relative_step_time"] for row in rows[:2]] == [str(0.25 / 0.75), str(0.5 / 0.75)]
    assert (rows[1]["bits_per_byte"], rows[1]["parameters"]) == ("2.25", "1039")
    assert (rows[3]["status"], rows[3]["reason"]) == ("failed", "diverged: step 3")
    assert (rows[4]["status"], rows[4]["bits_per_byte"], rows[4]["steps"]) == ("waiting", "", "0")


@pytest.mark.slow_cases("summarization-*", "speech_recognition-*")
@pytest.mark.parametrize(
    ("task", "name", "title"),
    [
        ("speech_recognition", "token_error_rate", "% of the tokens wrong"),
        ("text_classification", "score", "score, %"),
        ("summarization", "rougeL", "ROUGE-L"),
    ],
)
def test_what_a_task_compares_runs_by_has_a_column(
    tmp_path: Path, no_plots: None, task: str, name: str, title: str
) -> None:
    points = begun(tmp_path, task)
    assert title not in report.write(tmp_path, points, sweep())
    for point, rate in zip(points, (10.0, 15.0), strict=False):
        evaluated(
            tmp_path,
            point,
            {"rouge": {"rougeL": {"f1": rate}}} if name == "rougeL" else {name: rate},
        )
    table = report.write(tmp_path, points, sweep()).splitlines()
    column = [title in cell for cell in table[0].split(" | ")].index(True)
    assert [line.split(" | ")[column].strip() for line in table[2:4]] == ["12.50", "-"]
    with (tmp_path / "report.csv").open(newline="") as file:
        assert [row[name] for row in csv.DictReader(file)][:3] == ["10.0", "15.0", ""]


def test_plots_show_groups_with_their_seeds(points: list[Point], tmp_path: Path) -> None:
    groups = report.group(report.read(tmp_path, points, "validation"), "")
    (axes,) = report.trade_off(groups[:2]).axes
    assert [text.get_text() for text in axes.texts] == ["Slide", "Rec|skip"]
    assert [line.get_xdata()[0] for line in axes.get_lines()[::3]] == [375.0, 750.0]
    (axes,) = report.bars(groups[:2]).axes
    assert [bar.get_width() for bar in axes.patches] == [2.375, 2.125]
    assert list(axes.get_lines()[0].get_xdata()) == [2.5, 2.25], "a dot for each seed"
    low, high = axes.get_xlim()
    assert 0 < low < 2.125 and high > 2.5
    (axes,) = report.training_curves(groups[:2]).axes
    assert len(axes.get_lines()) == 4 and len(axes.get_legend().get_texts()) == 2
    assert axes.get_lines()[0].get_xdata()[-1] == 3000


def test_nothing_begun_is_a_report_too(tmp_path: Path) -> None:
    report.write(tmp_path, [point(0, "XL", 0)], sweep())
    assert "1 points: 1 waiting." in (tmp_path / "report.md").read_text()
    assert list((tmp_path / "plots").iterdir()) == []


def test_points_measured_with_different_jobs_are_marked(
    points: list[Point], tmp_path: Path
) -> None:
    directory = PointDirectory(tmp_path / points[0].directory)
    assert "jobs" not in report.text(tmp_path, *_read(tmp_path, points), [], sweep())
    directory.write(points[0], dataclasses.replace(directory.progress(), threads=1))
    assert "measured with different --jobs" in report.text(
        tmp_path, *_read(tmp_path, points), [], sweep()
    )


@pytest.mark.parametrize("what", ["", ".sweep.lock", "point.json", "output.txt"])
def test_a_link_in_a_sweep_is_not_followed(tmp_path: Path, what: str) -> None:
    other = point(0, "a", 0)
    directory = PointDirectory(tmp_path / "sweep" / other.directory)
    home = tmp_path / "home"
    home.mkdir()
    (home / "precious").write_text("precious")
    place = directory.path / what
    place.parent.mkdir(parents=True)
    place.symlink_to(home / "precious" if what else home)
    with pytest.raises(ConfigError, match=f"{place} is a symbolic link, which is not followed"):
        with directory.lock() as lock:
            directory.write(other, PointProgress())
            job.start(["brt", "--help"], directory, 0, 1, lock)
    assert (home / "precious").read_text() == "precious" and len(list(home.iterdir())) == 1


@pytest.mark.parametrize("name", ["report.md", ".report.lock", "plots"])
def test_a_report_follows_no_link(points: list[Point], tmp_path: Path, name: str) -> None:
    home = tmp_path / "home"
    home.mkdir()
    place = tmp_path / name
    place.symlink_to(home / "precious" if "report" in name else home)
    with pytest.raises(ConfigError, match=f"{place} is a symbolic link, which is not followed"):
        job.write_report(tmp_path, points, sweep())
    assert not list(home.iterdir())


def _read(workdir: Path, points: list[Point]) -> tuple[list[report.Row], list[report.Group]]:
    """Returns the rows and groups of a report."""
    rows = report.read(workdir, points, "validation")
    return rows, report.group(rows, "")


def test_plots_show_error_rates_where_there_are_any(tmp_path: Path) -> None:
    points = begun(tmp_path, "speech_recognition")
    for point, rate in zip(points, (10.0, 15.0), strict=False):
        evaluated(tmp_path, point, {"token_error_rate": rate})
        validated(tmp_path, point, "token_error_rate", {s: 100.0 - s for s in (20, 60)})
    groups = report.group(report.read(tmp_path, points, "validation"), "")
    metric = report.primary_metric(groups)
    (axes,) = report.bars(groups[:1], metric).axes
    assert [bar.get_width() for bar in axes.patches] == [12.5]
    lines = report.convergence(groups[:1], metric).axes[0].get_lines()
    assert [list(line.get_ydata()) for line in lines] == [[80, 40]] * 2
    assert [line.get_xdata()[1] for line in lines] == [0.25, 0.5], "the second trains half as fast"
    report.write(tmp_path, points, sweep())
    assert (tmp_path / "plots" / "convergence.png").exists()


def test_answers_of_memory_tasks_are_shown_by_distance(tmp_path: Path) -> None:
    points = begun(tmp_path)
    assert "windows" not in report.text(tmp_path, *_read(tmp_path, points), [], sweep())
    for point, exact in zip(points, (40.0, 60.0), strict=False):
        rows = [{"windows": 1, "answers_exact": 100.0}, {"windows": 8, "answers_exact": exact}]
        evaluated(tmp_path, point, {"answers": rows})
    groups = report.group(report.read(tmp_path, points, "validation"), "")
    assert [g.answers for g in groups] == [{1: 100.0, 8: 50.0}, {}, {}]
    report.write(tmp_path, points, sweep())
    text = (tmp_path / "report.md").read_text()
    lines = [
        line.replace(" ", "") for line in text.split("by the distance in windows")[1].splitlines()
    ]
    assert lines[2] == "||1|8|" and lines[4] == "|Slide|100.00|50.00|"
    assert (tmp_path / "plots" / "answers_against_distance.png").exists()


def test_answers_are_drawn_while_they_are_learned_beside_those_of_the_baseline(
    tmp_path: Path,
) -> None:
    points = begun(tmp_path)
    for i in range(4):
        validated(tmp_path, points[i], "answers_exact", {s: float(s + i) for s in (100, 300)})
    groups = report.group(report.read(tmp_path, points, "validation"), "")[:2]
    (panel,) = report.answers_learned(groups, groups[1]).axes
    assert panel.get_title() == groups[0].name
    lines = [list(line.get_ydata()) for line in panel.get_lines()]
    assert sorted(lines[:2]) == [[102, 302], [103, 303]], "the baseline's, behind"
    assert sorted(lines[2:]) == [[100, 300], [101, 301]]
    report.write(tmp_path, points, sweep())
    assert (tmp_path / "plots" / "answers_learned.png").exists()


def row(name: str, seconds: float, tokens: float) -> Row:
    """Returns a report row of a point with the given seconds and tokens per step."""
    return Row(
        point=Point(0, name, name, name, {}, Resolved(Config(), {}, {})), status="finished",
        reason="", metrics={"bits_per_byte": 2.0}, step_seconds=seconds,
        tokens_per_second=tokens / seconds, tokens_per_step=tokens, parameters=None,
        parameters_non_embedding=None, steps=1, seconds=1.0, threads=0, records=[], answers={},
        documents=None,
    )  # fmt: skip


def grouped(*rows: Row) -> list[Group]:
    """Returns the groups of the rows; the first row is the baseline."""
    return report.group(rows, rows[0].point.name)


def test_differences_to_the_baseline_have_intervals_over_documents_and_seeds(
    tmp_path: Path,
) -> None:
    rng, points = np.random.default_rng(0), []
    sizes, own = rng.integers(20, 90, 40), rng.normal(0, 2, 40)
    for i, (name, seed) in enumerate([("a", 0), ("a", 1), ("b", 0), ("b", 1), ("c", 0)]):
        points.append(point(i, name, seed))
        leave(tmp_path, points[-1], 2.0, [0.1, 0.1, 0.1])
        bits = sizes * (2.0 + 0.1 * (name == "b") + 0.01 * seed) + own + rng.normal(0, 1, 40)
        rows = [{"bits": b, "bytes": int(n)} for b, n in zip(bits, sizes, strict=True)]
        rows = rows[1:] if name == "c" else rows  # It has read other documents.
        path = PointDirectory(tmp_path / points[-1].directory).evaluation("validation")
        path.with_name("validation_documents.jsonl").write_text("\n".join(map(json.dumps, rows)))
    base, other, third = report.group(report.read(tmp_path, points, "validation"), "a")
    assert base.difference is None and third.difference is None
    value, half = other.difference
    assert abs(value - 0.1) < half < 0.1
    line = report.group_table([base, other, third])[3]
    assert f"{value:+.4f} ({value - half:+.4f} to {value + half:+.4f})" in line
    path.with_name("validation_documents.jsonl").write_text('{"bits": "many"}')
    with pytest.raises(CheckpointError, match="no report that brt wrote"):
        report.read(tmp_path, points, "validation")


def test_relative_times_are_of_steps_of_one_size() -> None:
    found = grouped(row("XL", 0.1, 128.0), row("Rec", 0.2, 128.4), row("Vanilla", 0.3, 1024.0))
    assert [g.relative_step_time for g in found] == [1.0, 2.0, None]


def test_the_tables_say_how_large_a_step_is() -> None:
    rows = row("XL", 0.1, 128.0), row("Vanilla", 0.3, 1024.0)
    head, _, *lines = (
        [c.strip() for c in x.split("|")] for x in report.group_table(grouped(*rows))
    )
    assert [line[head.index("tokens/step")] for line in lines] == ["128", "1,024"]
    assert [line[head.index("relative")] for line in lines] == ["1.00", "-"]
    assert "tokens/step" in report.point_table(rows)[0]
    assert "tokens_per_step" in report.table_csv(rows, grouped(*rows)).splitlines()[0]


def test_the_plot_compares_tokens_where_steps_differ() -> None:
    same = report.trade_off(grouped(row("a", 0.1, 128.0), row("b", 0.2, 128.0)))
    assert same.axes[0].get_xlabel() == "milliseconds of a training step"
    figure = report.trade_off(grouped(row("a", 0.1, 100.0), row("b", 0.1, 1000.0)))
    assert figure.axes[0].get_xlabel() == "milliseconds of training on 1,000 tokens"
    places = sorted(text.xy[0] for text in figure.axes[0].texts)
    assert places == pytest.approx([100.0, 1000.0])
