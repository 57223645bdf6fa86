import dataclasses

import pytest
from model_settings import with_settings

from brt.config import Model
from brt.models.flops import forward_flops_per_token

PAPER = Model(vocab_size=32000)
REC = with_settings(PAPER, {"Recurrence.layers": (-3,)})


@pytest.mark.parametrize(
    ("model", "millions"),  # counted by hand from the paper's sizes
    [
        (PAPER, 392.7),
        (dataclasses.replace(PAPER, window=1024), 417.9),
        (dataclasses.replace(PAPER, window=2048), 468.2),
        (dataclasses.replace(PAPER, layers=13), 420.0),
        (REC, 417.9),
        (with_settings(REC, {"Recurrence.gate_layout": "dual"}), 434.6),
        (dataclasses.replace(REC, feedback=True), 487.1),
    ],
)
def test_the_flops_of_the_papers_models_are_as_computed_by_hand(
    model: Model, millions: float
) -> None:
    assert forward_flops_per_token(model) / 1e6 == pytest.approx(millions, abs=0.1)


def test_gates_memories_and_centroids_cost() -> None:
    def of(**changes: object) -> int:
        return forward_flops_per_token(with_settings(PAPER, changes))

    recurrent = {"Recurrence.layers": (-3,)}
    fixed, gru, lstm = (
        of(**recurrent, **{"Recurrence.gate": gate}) for gate in ("fixed", "gru", "lstm")
    )
    # A kernel [2A, D], applied to one state per token.
    assert lstm - gru == gru - fixed == 2 * 2 * 1024 * 1024
    found = of(**{"Memorizing.layers": (-4,)}) - of()
    assert found == 2 * 1024 * 32768 + 4 * 1024 * 128
    clustered = (
        of(**{"Clustered.layers": (-4,), "Clustered.clusters": 64, "Clustered.top_k": 16}) - of()
    )
    # Products with 64 centroids, and attention to 256 keys that have left the window, on average,
    # and to 16 keys of the centroid.
    reading = 2 * 1024 * 64 + 4 * 1024 * (256 + 16)
    # Products of all keys with all centroids, and once per block of 512 tokens those of the 16 keys
    # of every centroid.
    taking_in = 4 * 1024 * 64
    assert clustered == reading + taking_in + taking_in * 16 // 512
