"""What a layer of cross-attention learns beside its projections, as data: shapes, first values."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from brt.ops import segmented_recurrent_attention as segmented
from brt.ops.cross_attention.baselines import Rnn
from brt.ops.segmented_recurrent_attention.config import CrossConfig


class Parameters(NamedTuple):
    """What a kind does not use is None.

    Attributes:
      raf: of `srformer`.
      memory_keys, memory_values: of `xl_memory` with `memory = "rnn"`.
    """

    raf: segmented.RecurrenceParameters = segmented.RecurrenceParameters()
    memory_keys: Rnn | None = None
    memory_values: Rnn | None = None


class Specification(NamedTuple):
    """One float32 array: what a module needs to own it.

    Attributes:
      axes: logical names, for sharding; None: not shared out.
      initializer: (rng, shape, dtype) -> array.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    initializer: Callable[..., Array]


def specifications(
    config: CrossConfig, heads: int, head_dim: int
) -> dict[str, dict[str, Specification]]:
    """All that a layer learns: {"raf": {"kernel": ..., ...}} and so on, {} for most kinds."""
    if config.kind == "srformer":
        results = _raf(config, head_dim)
        return {"raf": results} if results else {}
    if config.kind == "xl_memory" and config.memory == "rnn":
        return {"memory_keys": _rnn(heads * head_dim), "memory_values": _rnn(heads * head_dim)}
    return {}


def parameters_from(tree: Mapping[str, Mapping[str, Any]]) -> Parameters:
    """The arrays of a tree like `specifications`."""
    kinds = {"raf": segmented.RecurrenceParameters, "memory_keys": Rnn, "memory_values": Rnn}
    return Parameters(**{name: kinds[name](**arrays) for name, arrays in tree.items()})


def initial_parameters(rng: Array, config: CrossConfig, heads: int, head_dim: int) -> Parameters:
    """Float32 arrays by `specifications`."""
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


def _raf(config: CrossConfig, head_dim: int) -> dict[str, Specification]:
    constant, results = jax.nn.initializers.constant, {}
    kernel = {
        "uniform": _uniform(head_dim**-0.5),  # PyTorch's, which T5 of Hugging Face leaves alone
        "normal": jax.nn.initializers.normal(0.02),  # BART's
    }[config.kernel_init]
    if config.use_raf:
        leak, threshold = config.leak_init, config.threshold_init
        if config.raf_parameters == "bounded":  # what `effective` turns into these
            leak = float(np.log(leak / (1 - leak)))
            threshold = float(np.log(np.expm1(threshold - config.smallest_threshold)))
        results["kernel"] = Specification((head_dim, head_dim), (None, None), kernel)
        results["leak"] = Specification((), (), constant(leak))
        results["threshold"] = Specification((), (), constant(threshold))
        if config.raf_bias:
            zeros = jax.nn.initializers.zeros
            results["bias"] = Specification((head_dim,), (None,), zeros)
    if config.mix == "sigma":
        results["sigma"] = Specification((), (), constant(0.5))
    if config.mix == "gated":
        results["gate"] = Specification((), (), constant(0.0))
    return results


def _rnn(width: int) -> dict[str, Specification]:
    initialize = _uniform(width**-0.5)  # PyTorch's
    return {
        "input_kernel": Specification((width, width), ("heads", None), initialize),
        "kernel": Specification((width, width), (None, None), initialize),
        "bias": Specification((width,), (None,), initialize),
    }
