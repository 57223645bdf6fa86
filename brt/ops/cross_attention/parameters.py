"""The inputs of cross-attention, and its learned parameters apart from the projections."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from brt.ops.cross_attention.baselines import RnnWeights
from brt.ops.cross_attention.config import CrossConfig
from brt.ops.cross_attention.recurrence import RecurrenceParameters


class CrossParameters(NamedTuple):
    """Learned parameters of a layer's cross-attention, apart from its projections."""

    # the recurrence of `srformer`, with its recurrent accumulate-and-fire neurons
    raf: RecurrenceParameters = RecurrenceParameters()
    memory_keys: RnnWeights | None = None  # the RNNs of `xl_memory`
    memory_values: RnnWeights | None = None


class CrossInputs(NamedTuple):
    """The arrays of `api.attend`, which describes them."""

    queries: Float[Array, "B T H K"]
    keys: Float[Array, "B X H K"]
    values: Float[Array, "B X H K"]
    valid: Bool[Array, "B X"]
    parameters: CrossParameters


class ParameterSpec(NamedTuple):
    """Shape, sharding and initial value of a float32 parameter."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]  # the logical name of each axis; None if unsharded
    initializer: Callable[..., Array]  # a function of a random key, the shape and the dtype


def specifications(
    config: CrossConfig, heads: int, head_dim: int
) -> dict[str, dict[str, ParameterSpec]]:
    """Returns the specification of each parameter, as in {"raf": {"kernel": ..., "leak": ...}}.

    The outer keys are fields of `CrossParameters`. For kinds without parameters, the result is {}.
    """
    if config.kind == "srformer":
        results = _raf(config, head_dim)
        return {"raf": results} if results else {}
    if config.kind == "xl_memory":
        return {"memory_keys": _rnn(heads * head_dim), "memory_values": _rnn(heads * head_dim)}
    return {}


def parameters_from(tree: Mapping[str, Mapping[str, Any]]) -> CrossParameters:
    """Converts nested dictionaries with the keys of `specifications` to `CrossParameters`."""
    kinds = {
        "raf": RecurrenceParameters,
        "memory_keys": RnnWeights,
        "memory_values": RnnWeights,
    }
    return CrossParameters(**{name: kinds[name](**arrays) for name, arrays in tree.items()})


def initial_parameters(
    rng: Array, config: CrossConfig, heads: int, head_dim: int
) -> CrossParameters:
    tree = specifications(config, heads, head_dim)
    names = [(part, name) for part, entries in tree.items() for name in entries]
    keys = dict(zip(names, jax.random.split(rng, max(len(names), 1)), strict=False))
    return parameters_from(
        {
            part: {
                name: spec.initializer(keys[part, name], spec.shape, jnp.float32)
                for name, spec in entries.items()
            }
            for part, entries in tree.items()
        }
    )


def _uniform(bound: float) -> Callable[..., Array]:
    def initialize(rng: Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
        return jax.random.uniform(rng, shape, dtype, -bound, bound)

    return initialize


def _raf(config: CrossConfig, head_dim: int) -> dict[str, ParameterSpec]:
    constant, results = jax.nn.initializers.constant, {}
    # The authors' T5 keeps PyTorch's initialization of linear layers. Their BART is initialized as
    # Hugging Face's BART is, and the greater leak lets its neurons remember longer.
    kernel, leak = {
        "t5": (_uniform(head_dim**-0.5), 0.1),
        "bart": (jax.nn.initializers.normal(0.02), 0.5),
    }[config.family]
    if config.use_raf:
        results["kernel"] = ParameterSpec((head_dim, head_dim), (None, None), kernel)
        results["leak"] = ParameterSpec((), (), constant(leak))
        results["threshold"] = ParameterSpec((), (), constant(0.1))
    if config.mix == "sigma":
        results["sigma"] = ParameterSpec((), (), constant(0.5))
    if config.mix == "gated":
        results["gate"] = ParameterSpec((), (), constant(0.0))
    return results


def _rnn(width: int) -> dict[str, ParameterSpec]:
    # PyTorch initializes an RNN in the same way by default.
    initialize = _uniform(width**-0.5)
    return {
        "input_kernel": ParameterSpec((width, width), ("heads", None), initialize),
        "kernel": ParameterSpec((width, width), (None, None), initialize),
        "bias": ParameterSpec((width,), (None,), initialize),
    }
