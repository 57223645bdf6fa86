"""What several tests read in run directories, and the environment of commands that they start."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from brt.checkpointing import reader
from brt.config import Config, Data, Evaluation, Model, Optimizer, Training
from brt.training import inspection
from brt.training.workdir import Workdir


def environment(place: Path) -> dict[str, str]:
    """Returns an environment in which commands keep compiled programs in the directory."""
    return os.environ | {
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_COMPILATION_CACHE_DIR": str(place / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def state_hash(workdir: Path) -> str:
    """Returns the state hash of the newest checkpoint."""
    place = Workdir(workdir)
    return inspection.state_hash(place, reader.steps(place.checkpoints)[-1])


def metrics(workdir: Path) -> list[dict[str, Any]]:
    """Returns the lines of metrics.jsonl without metrics that depend on the clock."""
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if not k.startswith("perf/")} for line in lines]


def flip(file: Path, bit: int | None = None) -> None:
    """Inverts a bit of a file; None for one in the middle."""
    content = bytearray(file.read_bytes())
    bit = 8 * (len(content) // 2) if bit is None else bit
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def random_documents(place: Path) -> Data:
    """Writes eight documents of random letters, and returns the data of their splits."""
    text = np.random.default_rng(0).integers(97, 123, 2000).astype(np.uint8).tobytes().decode()
    for i in range(8):
        (place / f"{i}.txt").write_text(text[250 * i : 250 * (i + 1) - 20 * i])
    train, validation, test = ((str(place / names),) for names in ("[0-5].txt", "6.txt", "7.txt"))
    return Data(train=train, validation=validation, test=test)


def tiny_config(place: Path, **training: Any) -> Config:
    """Writes documents, and returns the config of a run that only evaluates if it is told so."""
    usual = {
        "batch_size": 2, "segment_length": 16, "gradient_accumulation": 1, "log_every": 1,
        "evaluate_every": 0, "sample_every": 0, "probe_every": 0, "plots": False,
    }  # fmt: skip
    return Config(
        model=Model(layers=1, model_dim=16, heads=2, head_dim=8, mlp_dim=16, window=8),
        data=random_documents(place), training=Training(**usual | training),
        optimizer=Optimizer(name="adamw", learning_rate=0.01, warmup_steps=2),
        evaluation=Evaluation(batch_size=1),
    )  # fmt: skip
