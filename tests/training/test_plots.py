"""Tests the curves that training draws, and what it says before the first step and at the end."""

import importlib.util
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import matplotlib.image
import numpy as np
import pytest

from brt import tasks
from brt.config import Config, Data, Mesh, Model, Training
from brt.config.model import SelfAttention
from brt.data import token_store
from brt.data.documents import Document
from brt.data.preparation import Dataset
from brt.data.tokenizers import ByteTokenizer
from brt.errors import DataError
from brt.tasks.report import BITS_PER_BYTE, Metric
from brt.training import plots, run_summary, workdir
from brt.training import run as runs
from brt.training.metrics import MetricsWriter, read_metrics
from brt.training.run import Run

XZ = ("xz -9e", 2.75)


def fail(message: str) -> None:
    raise AssertionError(message)


@pytest.fixture
def run(tmp_path: Path) -> workdir.Workdir:
    """Returns a run directory with metrics of training and evaluation."""
    run = workdir.create(tmp_path / "a run")
    writer = MetricsWriter(run, 0, fail)
    for step in range(10, 310, 10):
        writer.write(
            step,
            {
                "train/bits_per_token": 2 + 8 / step,
                "train/gradient_norm": 1.0,
                "train/learning_rate": 1 / step,
                "data/tokens": step * 100,
            },
        )
        if step % 100 == 0:
            writer.write(step, {"eval/validation/bits_per_byte": 2.2})
    writer.write(301, {"train/bits_per_token": float("nan")})
    writer.close()
    return run


def test_plots_are_pictures_with_something_in_them(run: workdir.Workdir) -> None:
    measure = Metric("bits_per_label", "bits per label")
    paths = plots.draw(run, measure, units_per_token=1.0, baseline=XZ)
    assert [path.name for path in paths] == ["bits_per_label.png", "optimization.png"]
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG")
        pixels = matplotlib.image.imread(path)
        assert min(pixels.shape[:2]) > 400
        assert len(np.unique(pixels[..., :3] @ [1, 256, 65536])) > 50


def test_the_figure_shows_bits_per_byte_against_tokens(run: workdir.Workdir) -> None:
    records = read_metrics(run.metrics)
    (axes,) = plots._bits_figure(records, BITS_PER_BYTE, 4.0, XZ).axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("training tokens", "bits per byte")
    raw, smooth, validation, xz = axes.get_lines()
    assert raw.get_xdata()[-1] == 30000
    np.testing.assert_allclose(raw.get_ydata()[-1], (2 + 8 / 300) / 4)
    assert list(validation.get_xdata()) == [10000, 20000, 30000]
    assert set(xz.get_ydata()) == {2.75}
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["train (smoothed)", "validation", "xz -9e of the whole held-out text (2.75)"]
    low, high = axes.get_ylim()
    assert low < min(smooth.get_ydata()) and high > 2.75


def test_no_training_step_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="metrics.jsonl records no training step, so there is"):
        plots.draw(workdir.create(tmp_path), BITS_PER_BYTE, units_per_token=1.0)


def test_summary_says_where_things_are_and_what_to_type(
    run: workdir.Workdir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (run.checkpoints / "300").mkdir()
    (run.checkpoints / "300/MANIFEST.sha256").touch()
    run.provenance.write_text("{}")
    config, text = Config(), "what is to be compressed"
    store = token_store.write(tmp_path / "s", [Document("a", iter([text]))], ByteTokenizer())
    dataset = Dataset(tmp_path, ByteTokenizer(), {"train": store, "validation": store})
    task = tasks.from_config(config)
    said = run_summary.finish(
        Run(config, task, dataset, None, None, None, None, None), run, time.perf_counter() - 7200
    )
    assert "Step 300, 30.0k tokens, 2:00:" in said
    name, xz = task.baseline(config, dataset)
    assert name == "xz -9e" and f"validation: 2.200 bits per byte (xz -9e: {xz:.3f})\n" in said
    assert f"  checkpoints  {run.checkpoints}\n" in said and str(run.metrics) in said
    assert str(run.samples) not in said and str(run.log) not in said, "they are empty or absent"
    assert said.endswith("  # pip install 'brt[tensorboard]'")
    assert f"  python -m brt.evaluate --workdir='{run.path}' --split=validation\n" in said
    assert f"  python -m brt.generate --workdir='{run.path}' --prompt=" in said
    assert (run.plots / "bits_per_byte.png").exists()


def test_the_start_is_told_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of two lanes has two segments per epoch, and no test data."""
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text(str(number) * 64)
    train, validation = ((f"{tmp_path}/{names}.txt",) for names in ("[0-3]", "4"))
    config = Config(
        model=Model(layers=1, model_dim=16, heads=2, head_dim=8, mlp_dim=32, window=8),
        data=Data(train=train, validation=validation, test_fraction=0.0, test=()),
        training=Training(batch_size=2, segment_length=64), mesh=Mesh(data=2),
    )  # fmt: skip
    run, place = runs.build(config), workdir.Workdir(tmp_path)
    monkeypatch.setattr(run_summary, "_memory", lambda device: None)
    total = sum(leaf.size for leaf in jax.tree.leaves(run.state_shapes.params))
    line = run_summary.describe_start(run, place)
    assert line.startswith(f"2 devices (cpu), {total / 1000:.1f}k parameters (")
    assert "), 128 tokens a step, 256 an epoch, train state " in line
    assert line.endswith(f"kB, writes to {tmp_path}")
    monkeypatch.setattr(run_summary, "_memory", lambda device: 80_000_000_000)
    assert "kB of 80.0GB on each device, " in run_summary.describe_start(run, place)


@pytest.mark.parametrize(
    ("kv_heads", "devices", "said"),
    [
        (2, 8, "SelfAttention.kv_heads = 2 heads of keys and values cannot be shared by Mesh.tens"),
        (2, 2, ""),
        (0, 8, ""),
    ],
)
def test_heads_of_keys_that_every_device_stores_are_said(
    kv_heads: int, devices: int, said: str
) -> None:
    run: Any = SimpleNamespace(
        config=Config(model=Model(heads=8, attention=SelfAttention(kv_heads=kv_heads))),
        mesh=SimpleNamespace(shape={"data": 1, "tensor": devices}, size=jax.device_count()),
        task=SimpleNamespace(model="model"), state_shapes=SimpleNamespace(params={}),
    )  # fmt: skip
    found = list(run_summary.notes.__wrapped__(run))
    assert len(found) == bool(said) and all(note.startswith(said) for note in found)
