import jax.numpy as jnp
import numpy as np
import pytest

from brt.ops.gates import GateWeights, gate

S, Z = jnp.full((1, 1, 2), 3.0), jnp.full((1, 1, 2), 7.0)
H = jnp.ones((1, 1, 1))
BIAS, KERNEL = jnp.array([0.5, -0.5]), jnp.array([[0.25, 2.0]])
INPUT_BIAS, INPUT_KERNEL = jnp.array([1.5, -0.25]), jnp.array([[0.75, -1.0]])


def sigmoid(*x: float) -> np.ndarray:
    return 1 / (1 + np.exp(-np.array(x)))


@pytest.mark.parametrize(
    ("kind", "weights", "keep", "take"),
    [
        ("fixed", GateWeights(BIAS), sigmoid(0.5, -0.5), sigmoid(-0.5, 0.5)),
        ("gru", GateWeights(BIAS, KERNEL), sigmoid(1.75, 2.5), sigmoid(-1.75, -2.5)),
        (
            "lstm", GateWeights(BIAS, KERNEL, INPUT_BIAS, INPUT_KERNEL),
            sigmoid(1.75, 2.5), sigmoid(1.25, -2.25),
        ),
    ],
)  # fmt: skip
def test_a_gate_keeps_and_takes_by_its_sigmoids(
    kind: str, weights: GateWeights, keep: np.ndarray, take: np.ndarray
) -> None:
    after = gate(kind, weights, S, Z.astype(jnp.bfloat16), H)
    assert after.dtype == jnp.float32
    np.testing.assert_allclose(after[0, 0], keep * 3 + take * 7, rtol=1e-6)


def test_an_unknown_gate_is_refused() -> None:
    with pytest.raises(ValueError, match="gate = 'highway' must be 'fixed', 'lstm' or 'gru'"):
        gate("highway", GateWeights(BIAS), S, Z, H)
