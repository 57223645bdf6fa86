"""Tests the FLOPs of decoders, counted by hand."""

from typing import Any

import pytest
from model_settings import with_settings

from brt.config import Model
from brt.layers.kinds import KINDS
from brt.memories import GatedDeltaNet
from brt.models.decoder import forward_flops_per_token

PAPER = Model(vocab_size=32000)
RECURRENT = {"Recurrence.layers": (-3,)}
DENSE = {"DenseMemory.layers": (5,), "DenseMemory.size": 8192}


def flops(changes: dict[str, Any]) -> int:
    return forward_flops_per_token(with_settings(PAPER, changes))


@pytest.mark.parametrize(
    ("changes", "millions"),
    [
        ({}, 392.7),
        ({"window": 1024}, 417.9),
        ({"window": 2048}, 468.2),
        ({"layers": 13}, 420.0),
        (RECURRENT, 417.9),
        ({**RECURRENT, "Recurrence.gate_layout": "dual"}, 434.6),
        ({**RECURRENT, "feedback": True}, 487.1),
    ],
)
def test_the_flops_of_the_papers_models_are_as_computed_by_hand(
    changes: dict[str, Any], millions: float
) -> None:
    assert flops(changes) / 1e6 == pytest.approx(millions, abs=0.1)


def test_a_gate_costs_a_kernel_of_one_state_per_token() -> None:
    fixed, gru, lstm = (
        flops({**RECURRENT, "Recurrence.gate": gate}) for gate in ("fixed", "gru", "lstm")
    )
    assert lstm - gru == gru - fixed == 2 * 2 * 1024 * 1024


# The layers have 8 heads of 128 channels and a window of 512 tokens. A token reads 256 tokens of
# its block on average, and as many of the block before it have left its window.
@pytest.mark.parametrize(
    ("changes", "added"),
    [
        ({"Memorizing.layers": (-4,)}, 2 * 1024 * 32768 + 4 * 1024 * 128),
        # Products with 64 centroids, attention to the keys that have left the window and to 16 keys
        # of the centroid; products of all keys with all centroids, and once per block those of the
        # 16 keys of every centroid.
        ({"Clustered.layers": (-4,), "Clustered.clusters": 64, "Clustered.top_k": 16},
         2 * 1024 * 64 + 4 * 1024 * (256 + 16) + 4 * 1024 * 64 + 4 * 1024 * 64 * 16 // 512),
        # The slots and the keys that have left the window; keys and values of slots; compression.
        ({"Compressive.layers": (5,)}, 4 * 1024 * (512 + 256) + 4 * 1024**2 + 2 * 1024**2),
        (DENSE, 4 * 1024 * (8192 + 256 - 512)),
        ({**DENSE, "DenseMemory.gate": "tanh"}, 4 * 1024 * (8192 + 256 - 512)),
        # Two heads with clusters have neither a window nor keys of their own.
        ({"Routing.layers": (5,), "Routing.keep": 256},
         2 * 256 * 16 + 4 * 256 * (256 - 512) - 2 * 1024 * 256),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_memory_adds_to_a_sliding_window_layer(changes: dict[str, Any], added: int) -> None:
    assert flops(changes) - flops({}) == added


@pytest.mark.parametrize(
    # Computed by hand: a layer with short memory, and the addition of a long memory.
    ("sizes", "millions"),
    [((128, 128, 8192, 64), (35.46, 42.63)), ((64, 64, 4096, 32), (30.75, 19.21))],
)
def test_the_flops_of_summary_layers_are_counted(sizes: tuple, millions: tuple) -> None:
    names = ("summaries", "short_memory", "long_memory", "long_increment")
    own = {f"Summaries.{name}": size for name, size in zip(names, sizes, strict=True)}
    short, long = (
        flops({**own, f"Summaries.{field}": (5,)}) for field in ("layers", "long_layers")
    )
    window = 4 * 2 * 1024**2 + 4 * 1024 * 4096 + 4 * 1024 * 512
    assert (window + short - flops({})) / 1e6 == pytest.approx(millions[0], abs=0.01)
    assert (long - short) / 1e6 == pytest.approx(millions[1], abs=0.01)


def test_the_flops_of_a_delta_memory_are_counted() -> None:
    section = GatedDeltaNet(layers=(0,), heads=3, key_dim=4, value_dim=6)
    model = Model(
        layers=1, model_dim=16, heads=2, head_dim=8, mlp_dim=16, window=4, kinds=(section,)
    )
    own = 2 * 16 * 3 * (2 * 4 + 3 * 6 + 2) + 8 * 3 * (2 * 4 + 6) + 6 * 3 * 4 * 6
    assert KINDS["gated_delta_net"].flops(model) == own + 4 * 16 * 16
    beside = with_settings(model, {"GatedDeltaNet.layers": (), "GatedDeltaNet.window_layers": (0,)})
    window = KINDS["window"].flops(beside)
    assert KINDS["window_gated_delta_net"].flops(beside) == own + window
