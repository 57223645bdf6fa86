import lzma
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from brt.errors import DataError
from brt.evaluation import drawing, report
from brt.training import workdir
from brt.training.metrics import MetricsWriter

XZ = ("xz -9e", 2.75)


def fail(message: str) -> None:
    raise AssertionError(message)


@pytest.fixture
def run(tmp_path: Path) -> workdir.Workdir:
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


def test_xz_compresses_each_document_on_its_own() -> None:
    documents = [b"to be or not to be, " * 50, b"", bytes(range(256))]
    size = sum(len(lzma.compress(d, preset=9 | lzma.PRESET_EXTREME)) for d in documents)
    assert report.xz_bits_per_byte(documents) == 8 * size / 1256
    assert report.xz_bits_per_byte(iter(documents[:1])) < 1
    with pytest.raises(DataError, match="no text to compress: all documents are empty"):
        report.xz_bits_per_byte([b""])


def test_entropy_is_of_the_shares_of_tokens() -> None:
    tokens = np.array([3] * 4 + [0] * 2 + [9, 7], np.uint8)
    np.testing.assert_allclose(report.token_entropy(tokens), 0.5 + 0.5 + 3 / 8 + 3 / 8)
    assert report.token_entropy(tokens[:4]) == 0


def test_plots_are_pictures_with_something_in_them(run: workdir.Workdir) -> None:
    paths = report.plot_training(run, bytes_per_token=1.0, yardstick=XZ)
    assert [path.name for path in paths] == ["bits_per_byte.png", "optimization.png"]
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG")
        pixels = matplotlib.image.imread(path)
        assert min(pixels.shape[:2]) > 400
        assert len(np.unique(pixels[..., :3] @ [1, 256, 65536])) > 50


def test_the_figure_shows_bits_per_byte_against_tokens(run: workdir.Workdir) -> None:
    records = report.read_metrics(run.metrics)
    (axes,) = report._bits_figure(records, 4.0, XZ).axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("training tokens", "bits per byte")
    raw, smooth, validation, xz = axes.get_lines()
    assert raw.get_xdata()[-1] == 30000
    np.testing.assert_allclose(raw.get_ydata()[-1], (2 + 8 / 300) / 4)
    assert list(validation.get_xdata()) == [10000, 20000, 30000]
    assert set(xz.get_ydata()) == {2.75}
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["train (smoothed)", "validation", "xz -9e of the held-out text (2.75)"]
    low, high = axes.get_ylim()
    assert low < min(smooth.get_ydata()) and high > 2.75


def test_smoothing_keeps_constants_and_stays_between() -> None:
    np.testing.assert_allclose(drawing.smoothed(np.full(300, 3.0)), 3.0)
    noisy = np.random.default_rng(0).normal(size=400)
    smooth = drawing.smoothed(noisy)
    assert smooth.std() < 0.5 * noisy.std()
    assert noisy.min() <= smooth.min() and smooth.max() <= noisy.max()


def test_no_training_step_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="metrics.jsonl records no training step, so there is"):
        report.plot_training(workdir.create(tmp_path), bytes_per_token=1.0)


def test_summary_says_where_things_are_and_what_to_type(run: workdir.Workdir) -> None:
    (run.checkpoints / "300").mkdir()
    (run.checkpoints / "300/MANIFEST.sha256").touch()
    text = report.summary(
        run,
        tokens=30_000,
        seconds=100.0,
        bits_per_byte={"validation": 2.3456},
        yardstick=XZ,
    )
    assert "Step 300, 30.0k tokens, 1:40 since the start.\n" in text
    assert "validation: 2.346 bits per byte (xz -9e: 2.750)\n" in text
    assert f"  checkpoints  {run.checkpoints}\n" in text
    assert f"  python -m brt.evaluate --workdir='{run.path}' --split=test\n" in text
