from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt.errors import BrtError
from brt.ops import dispatch
from brt.ops.dispatch import Implementation, Op
from brt.ops.partial_attention import AttentionPart
from brt.ops.window_attention import api, window_part
from brt.ops.window_attention.inputs import WindowInputs


def small(x: float, **_: Any) -> str | None:
    """Returns the reason for which numbers of 10 and more are refused, or None."""
    return f"takes numbers below 10, not {x}" if x >= 10 else None


OP = Op(
    "toy",
    (
        Implementation("pallas_tpu", lambda x: ("pallas_tpu", x), small),
        Implementation("xla_cpu", lambda x: ("xla_cpu", x), small),
        Implementation("xla", lambda x: ("xla", x), small),
        Implementation("reference", lambda x: ("reference", x)),
    ),
)


@pytest.fixture(autouse=True)
def _nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(dispatch, "_auto_choices", {})
    yield


def on(backend: str, name: str | None, x: float = 1) -> str:
    """Returns the name of the implementation of the toy op that runs on a backend."""
    with dispatch.use_backend(backend):
        return dispatch.run(OP, name, x)[0]


@pytest.mark.parametrize("name", [None, "auto"])
def test_auto_takes_the_first_that_the_backend_prefers(name: str | None) -> None:
    found = {backend: on(backend, name) for backend in ("cpu", "gpu", "tpu")}
    assert found == {"cpu": "xla_cpu", "gpu": "xla", "tpu": "pallas_tpu"}


def test_auto_passes_over_what_refuses_the_inputs_but_never_to_the_reference() -> None:
    picky = OP._replace(implementations=(OP.implementations[1], *OP.implementations[2:]))
    large = picky.implementations[1]._replace(refusal=lambda x: None)
    others = OP._replace(implementations=(picky.implementations[0], large))
    assert dispatch.run(others, None, 11)[0] == "xla"
    with pytest.raises(NotImplementedError) as error:
        dispatch.run(OP, None, 11)
    assert str(error.value) == (
        "no implementation of toy can run: it has 'pallas_tpu' (runs on tpu, not on cpu), "
        "'xla_cpu' (takes numbers below 10, not 11), 'xla' (takes numbers below 10, not 11), "
        "'reference' (supports these inputs)"
    )


def test_a_named_implementation_runs_or_is_refused_with_the_reason() -> None:
    assert [on("gpu", name) for name in ("xla_cpu", "reference")] == ["xla_cpu", "reference"]
    with pytest.raises(NotImplementedError, match="toy cannot run by 'xla': takes .* not 12; it"):
        on("cpu", "xla", 12)
    with pytest.raises(NotImplementedError, match="'pallas_tpu': runs on tpu, not on cpu; it has"):
        on("cpu", "pallas_tpu")


def test_an_unknown_name_lists_those_that_exist_and_what_each_refuses() -> None:
    with pytest.raises(NotImplementedError) as error:
        on("gpu", "cuda")
    assert str(error.value) == (
        "toy has no implementation 'cuda'; it has 'pallas_tpu' (runs on tpu, not on gpu), "
        "'xla_cpu' (supports these inputs), 'xla' (supports these inputs), "
        "'reference' (supports these inputs)"
    )
    assert isinstance(error.value, BrtError) and error.value.exit_code == 2


def test_what_auto_chose_is_known_and_what_was_named_is_not_a_choice() -> None:
    on("gpu", "reference")
    assert dispatch.auto_choices() == {}
    for backend in ("cpu", "cpu", "tpu"):
        on(backend, None)
    assert dispatch.auto_choices() == {"toy": "xla_cpu, pallas_tpu"}


def test_the_backend_is_the_process_s_where_none_is_given() -> None:
    with pytest.raises(RuntimeError), dispatch.use_backend("tpu"):
        assert dispatch.backend() == "tpu"
        raise RuntimeError
    assert dispatch.backend() == jax.default_backend()


def test_an_entry_is_all_that_a_new_implementation_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adds a toy implementation in front of the implementations of `window_attention`."""

    def values_alone(inputs: WindowInputs, **_: Any) -> AttentionPart:
        return AttentionPart(inputs.values, jnp.zeros(inputs.queries.shape[:-1]))

    def refuses_bias(inputs: WindowInputs, **_: Any) -> str | None:
        return None if inputs.bias is None else "has no bias"

    toy = Implementation("pallas_toy", values_alone, refusal=refuses_bias)
    own = api.OP.implementations
    monkeypatch.setattr(api, "OP", api.OP._replace(implementations=(toy, *own)))
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 4, 1, 2)), jnp.float32) for _ in range(3))
    cache_mask, bias = jnp.ones((1, 1), bool), jnp.zeros((1, 4))
    inputs = q, (k, v), k, v
    attend = jax.jit(lambda bias: window_part(*inputs, bias, cache_mask).output)
    np.testing.assert_array_equal(attend(None), v)
    assert np.any(attend(bias) != v)
    assert dispatch.auto_choices() == {"window_attention": "pallas_toy, xla"}
    with pytest.raises(NotImplementedError, match="'pallas_toy': has no bias"):
        window_part(*inputs, bias, cache_mask, implementation="pallas_toy")


def test_every_backend_has_a_policy_and_a_value() -> None:
    for name in dispatch.ANY:
        with dispatch.use_backend(name):
            assert dispatch.policy().dtype == ("float32" if name == "cpu" else "bfloat16")
            assert dispatch.for_backend("other", tpu="of TPUs") == {"tpu": "of TPUs"}.get(
                name, "other"
            )
