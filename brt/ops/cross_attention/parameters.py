"""Learned parameters of cross-attention apart from its projections: shapes and initial values."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from brt.ops import segmented_recurrent_attention as segmented
from brt.ops.cross_attention.baselines import RnnWeights
from brt.ops.segmented_recurrent_attention.config import CrossConfig


class CrossParameters(NamedTuple):
    """Parameters of a layer; None for those that the kind does not use.

    Attributes:
      raf: the recurrence of `srformer`.
      memory_keys, memory_values: the RNNs of `xl_memory` with `memory = "rnn"`.
    """

    raf: segmented.RecurrenceParameters = segmented.RecurrenceParameters()
    memory_keys: RnnWeights | None = None
    memory_values: RnnWeights | None = None


class ParameterSpec(NamedTuple):
    """The specification of a float32 parameter.

    Attributes:
      shape: the shape.
      axes: logical names for sharding; None for unsharded axes.
      initializer: (rng, shape, dtype) -> array.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    initializer: Callable[..., Array]


def specifications(
    config: CrossConfig, heads: int, head_dim: int
) -> dict[str, dict[str, ParameterSpec]]:
    """Returns the parameters of a layer as {"raf": {"kernel": ..., ...}, ...}, {} for
    most kinds.
    """
    if config.kind == "srformer":
        results = _raf(config, head_dim)
        return {"raf": results} if results else {}
    if config.kind == "xl_memory" and config.memory == "rnn":
        return {"memory_keys": _rnn(heads * head_dim), "memory_values": _rnn(heads * head_dim)}
    return {}


def parameters_from(tree: Mapping[str, Mapping[str, Any]]) -> CrossParameters:
    """Returns the parameters from a tree of arrays shaped like `specifications`."""
    kinds = {
        "raf": segmented.RecurrenceParameters,
        "memory_keys": RnnWeights,
        "memory_values": RnnWeights,
    }
    return CrossParameters(**{name: kinds[name](**arrays) for name, arrays in tree.items()})


def initial_parameters(
    rng: Array, config: CrossConfig, heads: int, head_dim: int
) -> CrossParameters:
    """Returns initial float32 parameters."""
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
    kernel = {
        # PyTorch's default, which the T5 of Hugging Face keeps.
        "uniform": _uniform(head_dim**-0.5),
        "normal": jax.nn.initializers.normal(0.02),  # The initializer of BART.
    }[config.kernel_init]
    if config.use_raf:
        leak, threshold = config.leak_init, config.threshold_init
        if config.raf_parameters == "bounded":  # The inverse of `recurrence.leak_and_threshold`.
            leak = float(np.log(leak / (1 - leak)))
            threshold = float(np.log(np.expm1(threshold - config.smallest_threshold)))
        results["kernel"] = ParameterSpec((head_dim, head_dim), (None, None), kernel)
        results["leak"] = ParameterSpec((), (), constant(leak))
        results["threshold"] = ParameterSpec((), (), constant(threshold))
        if config.raf_bias:
            zeros = jax.nn.initializers.zeros
            results["bias"] = ParameterSpec((head_dim,), (None,), zeros)
    if config.mix == "sigma":
        results["sigma"] = ParameterSpec((), (), constant(0.5))
    if config.mix == "gated":
        results["gate"] = ParameterSpec((), (), constant(0.0))
    return results


def _rnn(width: int) -> dict[str, ParameterSpec]:
    initialize = _uniform(width**-0.5)  # PyTorch's default.
    return {
        "input_kernel": ParameterSpec((width, width), ("heads", None), initialize),
        "kernel": ParameterSpec((width, width), (None, None), initialize),
        "bias": ParameterSpec((width,), (None,), initialize),
    }
