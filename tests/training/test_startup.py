"""Tests the notes about a run that are printed before its first step."""

from types import SimpleNamespace
from typing import Any

import pytest

from brt.config import Config, Model
from brt.config.model import SelfAttention
from brt.training import run_summary


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
        mesh=SimpleNamespace(shape={"data": 1, "tensor": devices}),
        task=SimpleNamespace(model="model"),
    )
    found = run_summary.replicated_keys.__wrapped__(run)
    assert found.startswith(said) and bool(found) == bool(said)
