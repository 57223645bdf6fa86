"""Tests that output before the first step is true, and that files named at the end exist."""

import dataclasses
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from brt.config import Config, Data, Mesh, Model, Training
from brt.config.model import SelfAttention
from brt.training import run as runs
from brt.training import run_summary, workdir
from brt.training.run import Run

MODEL = Model(layers=1, model_dim=16, heads=2, head_dim=8, mlp_dim=32, window=8)
DOCUMENTS, LENGTH = 4, 64


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Builds a run of two lanes with two segments per epoch, and without test data."""
    texts = tmp_path_factory.mktemp("texts")
    for number in range(DOCUMENTS + 1):
        (texts / f"{number}.txt").write_text(str(number) * LENGTH)
    data = Data(
        train=(f"{texts}/[0-3].txt",), validation=(f"{texts}/4.txt",), test_fraction=0.0, test=()
    )
    training = Training(batch_size=2, segment_length=64)
    return runs.build(Config(model=MODEL, data=data, training=training, mesh=Mesh(data=2)))


def test_the_start_is_told_in_a_line(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_summary, "_memory", lambda device: None)
    total = sum(leaf.size for leaf in jax.tree.leaves(run.state_shapes.params))
    line = run_summary.describe_start(run, workdir.Workdir(tmp_path))
    assert line.startswith(f"2 devices (cpu), {total / 1000:.1f}k parameters (")
    assert f"), {2 * LENGTH} tokens a step, {DOCUMENTS * LENGTH} an epoch, train state " in line
    assert line.endswith(f"kB, writes to {tmp_path}")
    monkeypatch.setattr(run_summary, "_memory", lambda device: 80_000_000_000)
    assert "kB of 80.0GB on each device, " in run_summary.describe_start(
        run, workdir.Workdir(tmp_path)
    )


def test_nothing_is_named_that_is_empty_or_absent(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    place = workdir.create(tmp_path)
    place.metrics.write_text("{}\n")
    (place.samples / "00000001.txt").write_text("a text")
    text = "\n".join(run_summary._places(run, place))
    assert "metrics.jsonl" in text and "samples" in text
    assert "plots" not in text and "log.txt" not in text and "checkpoints" not in text
    assert "--split=validation" in text and "--split=test" not in text
    assert text.endswith("  # pip install 'brt[tensorboard]'")
    splits = run.dataset.splits | {"test": run.dataset.splits["validation"]}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    (place.plots / "a.png").write_bytes(b"")
    text = "\n".join(
        run_summary._places(
            run._replace(dataset=dataclasses.replace(run.dataset, splits=splits)), place
        )
    )
    assert "plots" in text and "--split=test" in text and "pip install" not in text


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
