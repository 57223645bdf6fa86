"""Tests the curves and the summary that training writes."""

import time
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from brt import tasks
from brt.config import Config
from brt.data import token_store
from brt.data.documents import Document
from brt.data.preparation import Dataset
from brt.data.tokenizers import ByteTokenizer
from brt.errors import DataError
from brt.tasks.report import BITS_PER_BYTE, Metric
from brt.training import plots, run_summary, workdir
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
    paths = plots.draw(run, BITS_PER_BYTE, units_per_token=1.0, baseline=XZ)
    assert [path.name for path in paths] == ["bits_per_byte.png", "optimization.png"]
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


def test_the_plot_of_another_metric_has_the_name_of_the_metric(run: workdir.Workdir) -> None:
    measure = Metric("bits_per_label", "bits per label")
    assert plots.draw(run, measure, units_per_token=1.0)[0].name == "bits_per_label.png"
    (axes,) = plots._bits_figure(read_metrics(run.metrics), measure, 1.0, None).axes
    assert axes.get_ylabel() == "bits per label"


def test_summary_says_where_things_are_and_what_to_type(
    run: workdir.Workdir, tmp_path: Path
) -> None:
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
    assert f"  checkpoints  {run.checkpoints}\n" in said
    assert f"  python -m brt.evaluate --workdir='{run.path}' --split=validation\n" in said
    assert f"  python -m brt.generate --workdir='{run.path}' --prompt=" in said
    assert (run.plots / "bits_per_byte.png").exists()
