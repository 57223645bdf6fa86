"""Tests that Adafactor's step equals the updates of optax."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from brt.config import Optimizer
from brt.errors import UnsupportedError
from brt.ops import dispatch
from brt.ops.adafactor import api, pallas_tpu
from brt.training import layer_forms
from brt.training import optimizer as optimizers
from brt.training.layerwise import stepper
from brt.training.state import TrainState

AXES = {
    "embedding": ("vocab", "embed"),
    "norm": ("embed",),
    "stack/ids": ("layers", "states", "embed"),
    "stack/queries": ("layers", "embed", "heads", "head_dim"),
    "stack/narrow": ("layers", "embed", "heads", "head_dim"),
    "stack/output": ("layers", "stack", "heads", "head_dim", "embed"),
    "stack/mlp_in": ("layers", "embed", "mlp"),
    "stack/mlp_out": ("layers", "mlp", "embed"),
    "stack/odd": ("layers", "embed", "mlp"),
    "stack/norm": ("layers", "embed"),
    "head/kernel": ("embed", "heads", "head_dim"),
    "head/none": (),
}
SHAPES = {
    "embedding": (264, 128), "norm": (128,), "stack/ids": (3, 8, 128),
    "stack/queries": (3, 136, 8, 128), "stack/narrow": (3, 136, 2, 64),
    "stack/output": (3, 2, 2, 64, 128), "stack/mlp_in": (3, 128, 256),
    "stack/mlp_out": (3, 256, 128), "stack/odd": (3, 130, 131), "stack/norm": (3, 128),
    "head/kernel": (128, 2, 64), "head/none": (128, 2, 64),
}  # fmt: skip
SETTINGS = {"warmup_steps": 0, "learning_rate": 0.5}


def tree(seed: int, scale: float = 1.0) -> dict:
    """Returns an array for each of SHAPES, with magnitudes that differ between layers."""
    rng = np.random.default_rng(seed)

    def normal(shape: tuple[int, ...]) -> jax.Array:
        layers = np.arange(1.0, 1 + shape[0]).reshape(-1, *(1,) * (len(shape) - 1))
        return jnp.asarray(scale * layers * rng.normal(size=shape), jnp.float32)

    found: dict[str, Any] = {}
    for path, shape in SHAPES.items():
        *parents, name = path.split("/")
        functools.reduce(lambda at, key: at.setdefault(key, {}), parents, found)[name] = normal(
            shape
        )
    return found


GRADIENTS = {
    "steps": [tree(1), tree(2, 1e-3), tree(3, 1e2)],
    # Growing gradients make updates larger than their moving averages, which are clipped.
    "clipped": [tree(1, 1e-3), tree(2, 1e-3), tree(3)],
    "zeros": [tree(1, 0.0), tree(2, 0.0), tree(3)],
}


def separated(params: dict, state: Any = ()) -> TrainState:
    """Returns parameters and state with a list of arrays in place of each stack of layers."""
    return layer_forms.separated(TrainState(jnp.int32(0), params, state, (), {}), AXES)


def trained(
    settings: Optimizer,
    gradients: list[dict],
    implementation: str | None,
    start: dict,
    lists: bool = False,
) -> tuple[dict, Any, list[Any]]:
    """Returns the parameters and the state after some steps, and the norm of each gradient.

    Args:
      settings: settings of the optimizer.
      gradients: the gradients of each step.
      implementation: the implementation of the op "adafactor"; None adds updates of optax.
      start: the parameters before the first step.
      lists: True computes the steps with a list of arrays in place of each stack of layers.
    """
    if implementation:
        optimizer = optimizers.build(settings, 3, AXES, implementation)
    else:
        transform = optimizers.transformation(settings, 3, AXES)
        clip = optax.clip_by_global_norm(settings.clip_norm)
        optimizer = stepper(optax.chain(clip, transform) if settings.clip_norm else transform)
    step, state = jax.jit(optimizer.step), optimizer.init(start)
    norms = []
    if lists:
        _, start, state, *_ = separated(start, state)
        gradients = [separated(gradient).params for gradient in gradients]
    for gradient in gradients:
        start, state, norm = step(gradient, state, start, jnp.float32(3.0))
        norms.append(norm)
    return jax.device_get((*map(layer_forms.stacked, (start, state)), norms))


CASES = {
    "steps": (Optimizer(**SETTINGS), "steps"),
    "clipped": (Optimizer(**SETTINGS), "clipped"),
    "zeros": (Optimizer(**SETTINGS), "zeros"),
    "clip_norm and rates": (
        Optimizer(
            **SETTINGS, clip_norm=0.5, rates=(("*queries", 0.5, 1.0), ("*mlp_in", 0.0, 1.0))
        ),
        "steps",
    ),
}  # fmt: skip


@functools.cache
def steps(case: str, implementation: str | None = None, lists: bool = False) -> tuple:
    """Returns the results of `trained` for a case; without an implementation, those of optax."""
    settings, gradients = CASES[case]
    return trained(settings, GRADIENTS[gradients], implementation, tree(0), lists)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_step_with_a_list_of_layers_equals_one_with_a_stack(case: str) -> None:
    assert_equal(steps(case, lists=True), steps(case))


@pytest.mark.slow  # tests/training/test_optimizer.py has a quick comparison with the paper.
@pytest.mark.parametrize("case", CASES)
def test_a_step_on_cpus_is_bit_by_bit_that_of_optax(case: str) -> None:
    actual, expected = steps(case, "auto"), steps(case)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("lists", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_a_step_by_the_kernel_equals_optax(
    case: str, lists: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = steps(case)
    by_name = {one.name: one for one in api.OP.implementations}
    both = by_name["pallas_interpret"], by_name["xla"]
    monkeypatch.setattr(api, "OP", api.OP._replace(implementations=both))
    monkeypatch.setitem(dispatch._AUTO, "pallas_interpret", dispatch.ANY)
    monkeypatch.setattr(pallas_tpu, "_SMALLEST", 0)
    monkeypatch.setattr(dispatch, "_auto_choices", {})
    actual = steps.__wrapped__(case, "auto", lists)
    # The matrix of 130 x 131 is left to XLA.
    assert dispatch.auto_choices() == {"adafactor": "pallas_interpret, xla"}
    assert_equal(actual, expected)


def assert_equal(actual: Any, expected: Any) -> None:
    """Checks that two trees agree within the rounding of float32."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.shape == e.shape and a.dtype == e.dtype
        np.testing.assert_allclose(a, e, rtol=0, atol=2e-6 * np.abs(e).max())


def test_an_implementation_that_does_not_support_a_matrix_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="tiles of 128 KiB, not of 88 rows"):
        trained(Optimizer(**SETTINGS), GRADIENTS["steps"], "pallas_interpret", tree(0))
