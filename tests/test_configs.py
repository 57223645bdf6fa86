"""Tests the configs in docs/configs.md.

Each row of the table must give the settings in tests/data/paper_rows.json, and the sizes and the
training of the paper.
"""

import dataclasses
import json
import re
import shlex
from functools import cache
from itertools import groupby, product
from pathlib import Path

import flax.linen as nn
import jax
import pytest
from model_settings import PARITY, with_settings

from brt import command_line, tasks
from brt.config import Config, Encoder, Model, Pairs, Training
from brt.config.names import class_field_types, has_section, section_of
from brt.training.state import initial_params, parameter_counts

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/configs.md").read_text()
ROW = re.compile(r"^\| ([\w/.]+) \| .+ \| (?:`('?--.+)`|none) \|$", re.M)


def experiments(page: str) -> dict[str, list[str]]:
    """Returns the flags of each experiment of a page.

    Rows `START...` and `...END` of a section are the experiment `STARTEND` together, unless the
    section has a row with this name.
    """
    found = {}
    for section in page.split("\n## "):
        rows = {name: shlex.split(flags) for name, flags in ROW.findall(section)}
        starts = [name for name in rows if name.endswith("...")]
        ends = [name for name in rows if name.startswith("...")]
        for start, end in product(starts, ends):
            found[f"{start}{end}".replace("...", "")] = rows[start] + rows[end]
        found |= {name: flags for name, flags in rows.items() if "..." not in name}
    return found


ROWS = experiments(PAGE)
PINNED_ROWS = json.loads((ROOT / "tests/data/paper_rows.json").read_text())
DATASETS = ("pg19_bytes", "pg19_tokens", "arxiv", "github")
# Size of T5's vocabulary, with which the parameters of the original code were counted.
VOCABULARY = 32128
VOCABULARIES = {"t5": VOCABULARY, "bart": 50265}
OF_AUTHORS = ("slide_13", "rec_lstm_single", "feedback_fixed_skip", "memorizing")
# Number of parameters without the embedding, from the shapes of the original code.
PINNED = {
    "xl_512": 151_023_712,
    "xl_1024": 151_023_712,
    "xl_2048": 151_023_712,
    "vanilla": 151_023_712,
    "slide_12": 151_023_712,
    "slide_13": 163_608_936,
    "rec_fixed_skip": 160_462_968,
    "rec_fixed_single": 170_948_728,
    "rec_fixed_dual": 168_853_624,
    "rec_lstm_skip": 164_658_296,
    "rec_lstm_single": 179_338_360,
    "rec_lstm_dual": 181_438_584,
    "feedback_fixed_skip": 183_531_728,
    "feedback_lstm_single": 202_407_120,
    "slide_13_large": 327_190_224,
    "rec_lstm_single_large": 374_376_688,
    "rec_fixed_skip_large": 319_849_712,
    # As XL:512, but with a gate per head instead of the position bias of one layer.
    "memorizing": 151_023_712 - 8 * 32 + 8,
}
# Number of parameters of MELODI without the embedding, for the sizes in its paper.
MELODI = {"s128_l64": 166_035_112, "s192_l96": 167_513_416}
SIZES = {
    "Recurrence": {"states": 8},
    "Memorizing": {"size": 32, "neighbors": 4},
    "DenseMemory": {"size": 32},
    "Clustered": {"clusters": 4, "top_k": 2},
    "Summaries": {
        "summaries": 2,
        "short_memory": 2,
        "long_memory": 4,
        "long_increment": 2,
    },
    "Compressive": {"slots": 8},
    "GatedDeltaNet": {"heads": 2, "key_dim": 4, "value_dim": 4},
    "Routing": {"heads": 1, "clusters": 2, "keep": 2},
}


@cache
def resolved(row: str) -> Config:
    parser = command_line.parser("test")
    command_line.add_config_flags(parser)
    return command_line.resolve(parser.parse_args(ROWS[row])).config


def rows_of(*families: str) -> list[str]:
    return [row for row in ROWS if family(row) in families]


def family(row: str) -> str:
    return row.rpartition("/")[0]


def short(row: str) -> str:
    return row.rpartition("/")[2]


@cache
def parameters(model: Model) -> tuple[int, int]:
    """Returns the number of all parameters, and of those without the embedding."""
    config = Config(model=model, training=Training(segment_length=model.window))
    shapes = jax.eval_shape(lambda: initial_params(config))
    return parameter_counts(nn.meta.unbox(shapes))


def structure(model: Model) -> Model:
    """Returns the model with small sizes, and at most two layers of each group of equal layers.

    Models that differ only in sizes are traced in the same way, and have the same result here.
    """
    kinds = [kind for _, run in groupby(model.layer_types) for kind in list(run)[:2]]
    sizes = {name: value for name, value in SIZES.items() if has_section(Config(model=model), name)}
    places = {
        section.field_of(kind): tuple(i for i, other in enumerate(kinds) if other == kind)
        for section in model.kinds
        for kind in section.layers_by_kind()
    }
    own = {
        f"{section}.{field}": v for section, fields in sizes.items() for field, v in fields.items()
    }
    small = {
        "layers": len(kinds), "vocab_size": 8, "model_dim": 8, "heads": 2, "head_dim": 4,
        "mlp_dim": 8, "window": 8, "dropout": 0.0,
    }  # fmt: skip
    return with_settings(model, small | own | places)


@cache
def decoders() -> dict[Model, Model]:
    """Returns a model for each structure; one whose parameter count is known, if possible."""
    rows = [row for row in ROWS if tasks.from_config(resolved(row)).model == "model"]
    models = [sized(row) for row in sorted(rows, key=lambda row: family(row) in DATASETS)]
    return {structure(model): model for model in models}


def sized(row: str) -> Model:
    """Returns the decoder of a row, with the size of a vocabulary."""
    vocabulary = VOCABULARY if family(row) in DATASETS else 256
    return dataclasses.replace(resolved(row).model, vocab_size=vocabulary)


each_row = pytest.mark.parametrize("row", ROWS)


def test_the_tables_have_every_experiment_once() -> None:
    tables = re.findall(r"^\| row \|.+\n\|[-|]+\|\n((?:\|.+\n)+)", PAGE, re.M)
    names = [ROW.fullmatch(line) for table in tables for line in table.splitlines()]
    assert all(names) and len(names) == len(ROW.findall(PAGE))
    whole = [row[1] for row in names if row and "..." not in row[1]]
    assert len(whole) == len(set(whole))
    assert ROWS.keys() == PINNED_ROWS.keys()


@each_row
def test_a_row_is_the_pinned_run(row: str) -> None:
    """All fields of all sections are compared, not only those that the row sets; but not
    Training.init_keep, which says what it sets.
    """
    config, usual = resolved(row), Config()
    found = {}
    for name in class_field_types().keys() - {"Training.init_keep"}:
        section, _, field = name.partition(".")
        value = getattr(section_of(config, section), field)
        if value != getattr(section_of(usual, section), field):
            found[name] = value
    assert json.loads(json.dumps(found)) == PINNED_ROWS[row]


def test_every_file_is_of_a_row_or_a_sweep_or_is_a_preset() -> None:
    texts = [PAGE, (ROOT / "docs/scaling.md").read_text()]
    texts += [file.read_text() for file in (ROOT / "configs").rglob("*.gin")]
    named = set(re.findall(r"configs/[\w/]+\.gin", "\n".join(texts)))
    files = {str(f.relative_to(ROOT)) for f in (ROOT / "configs").rglob("*.gin")}
    alone = ("configs/sweeps/", "configs/cross_attention/", "configs/decoders/")
    assert {file for file in files - named if not file.startswith(alone)} == set()


def test_documents_name_files_that_exist() -> None:
    for document in [
        ROOT / "README.md",
        *(ROOT / "docs").glob("*.md"),
        *ROOT.glob("launch/**/*.*"),
    ]:
        for file in re.findall(r"configs/[\w/]+\.gin", document.read_text()):
            assert (ROOT / file).is_file(), (document.name, file)


@pytest.mark.slow_cases(
    "tiny/*",
    "small/*",
    "pg19_tokens/*",
    "arxiv/*",
    "github/*",
    "ablations/*",
    "melodi/*",  # test_layers_that_sum_up_have_the_originals_parameters
    "linear/gated_delta_net",
    "routing/pg19",
    "compressive/pg19",
    "memory/copy_slide",
    "long_context/*",
    "pg19_bytes/xl*",
    "pg19_bytes/feedback*",
    "pg19_bytes/rec_lstm*",
    "pg19_bytes/rec_fixed_dual",
    "pg19_bytes/rec_fixed_single",
)
@each_row
def test_every_config_builds_a_model_of_the_known_size(row: str) -> None:
    """Among models that differ only in sizes, those with a known parameter count are checked."""
    config = resolved(row)
    match tasks.from_config(config).model:
        case "seq2seq":
            assert seq2seq_parameters(config) > 0
        case "encoder":
            assert encoder_parameters(config.encoder, config.training.task) > 0
        case "model" if family(row) in DATASETS:
            total, non_embedding = parameters(sized(row))
            assert total == non_embedding + VOCABULARY * config.model.model_dim
            assert non_embedding == PINNED[short(row)]
        case "model":
            assert parameters(decoders()[structure(sized(row))])[1] > 0


@pytest.mark.slow_cases("s192*")
@pytest.mark.parametrize(("name", "count"), MELODI.items())
def test_layers_that_sum_up_have_the_originals_parameters(name: str, count: int) -> None:
    assert parameters(sized(f"melodi/pg19_{name}"))[1] == count


@pytest.mark.slow_cases("feedback_fixed_skip", "slide_13")
@pytest.mark.parametrize("name", OF_AUTHORS)
def test_the_originals_arithmetic_has_the_same_parameters(name: str) -> None:
    assert parameters(with_settings(sized(f"pg19_bytes/{name}"), PARITY))[1] == PINNED[name]


def seq2seq_parameters(config: Config) -> int:
    model = config.seq2seq
    vocabulary = model.vocab_size or VOCABULARIES[model.family]
    model = dataclasses.replace(model, vocab_size=vocabulary)
    cross = dataclasses.replace(config.cross_attention, q_ref=Pairs().max_target_length)
    training = Training(task="summarization")
    return count_scored(Config(training=training, seq2seq=model, cross_attention=cross))


@cache
def count_scored(config: Config) -> int:
    return parameter_counts(nn.meta.unbox(jax.eval_shape(lambda: initial_params(config))))[0]


def encoder_parameters(encoder: Encoder, task: str) -> int:
    """Counts the parameters of the smallest encoder that is traced like this one."""
    encoder = dataclasses.replace(
        encoder, layers=2, model_dim=8, heads=2, mlp_dim=8, vocab_size=32, dropout=0.0,
        features=40 if task == "speech_recognition" else 0,
    )  # fmt: skip
    return count_scored(Config(encoder=encoder, training=Training(task=task)))


@pytest.mark.parametrize(
    ("model", "count", "of_recurrence"),
    [("t5_small", 60_506_624, 6 * 4098), ("bart_base", 139_420_416, 6 * 4098)],
)
def test_summarisers_have_the_sizes_of_the_pretrained_ones(
    model: str, count: int, of_recurrence: int
) -> None:
    rows = [row for row in rows_of("summarization") if short(row).startswith(model)]
    assert len(rows) == 4
    for row in rows:
        config = resolved(row)
        assert config.training.epochs == 25
        # BART adds a bias to the logits, which is not trained.
        bias = VOCABULARIES["bart"] if model == "bart_base" else 0
        assert seq2seq_parameters(config) == count + bias
        srformer = dataclasses.replace(config.cross_attention, kind="srformer")
        config = dataclasses.replace(config, cross_attention=srformer)
        assert seq2seq_parameters(config) == count + bias + of_recurrence


@pytest.mark.parametrize("size", ["tiny", "small"])
def test_every_row_exists_at_small_sizes_and_reads_the_same_tokens(size: str) -> None:
    rows = rows_of(size)
    smaller = {"xl_512": "xl_1", "xl_1024": "xl_2", "xl_2048": "xl_4",
               "slide_12": "slide", "slide_13": "slide_plus_1"}  # fmt: skip
    wanted = {smaller.get(name, name) for name in PINNED if "large" not in name}
    assert set(map(short, rows)) == wanted
    training = [resolved(row).training for row in rows]
    assert len({t.batch_size * t.segment_length for t in training}) == 1
    assert len({t.steps for t in training}) == 1
