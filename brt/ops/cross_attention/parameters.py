"""Learned parameters of cross-attention apart from its projections: shapes and initial values.

The kind `srformer` of cross-attention has a recurrence over the segments of the source with
recurrent accumulate-and-fire neurons (RAF), and the kind `xl_memory` has two RNNs. The other kinds
have no such parameters.
"""

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
    """Learned parameters of a layer's cross-attention, apart from its projections.

    Attributes:
      raf: parameters of the recurrent accumulate-and-fire neurons of `srformer`. For other kinds of
        cross-attention, all fields of `raf` are None.
      memory_keys, memory_values: the RNNs of `xl_memory`; None for other kinds.
    """

    raf: segmented.RecurrenceParameters = segmented.RecurrenceParameters()
    memory_keys: RnnWeights | None = None
    memory_values: RnnWeights | None = None


class ParameterSpec(NamedTuple):
    """Shape, sharding and initial value of a float32 parameter.

    Attributes:
      shape: the shape.
      axes: the logical name of each axis, for sharding; None for unsharded axes.
      initializer: a function from a random key, the shape and the dtype to the initial value.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    initializer: Callable[..., Array]


def specifications(
    config: CrossConfig, heads: int, head_dim: int
) -> dict[str, dict[str, ParameterSpec]]:
    """Returns the shape, sharding and initial value of each parameter of a layer's cross-attention.

    The keys of the outer dictionary are names of fields of `CrossParameters`, and the keys of an
    inner dictionary are names of arrays, as in {"raf": {"kernel": ..., "leak": ...}}. The
    dictionary is empty for kinds of cross-attention without parameters.

    Args:
      config: settings of cross-attention.
      heads: the number of heads.
      head_dim: the size of a head.
    """
    if config.kind == "srformer":
        results = _raf(config, head_dim)
        return {"raf": results} if results else {}
    if config.kind == "xl_memory":
        return {"memory_keys": _rnn(heads * head_dim), "memory_values": _rnn(heads * head_dim)}
    return {}


def parameters_from(tree: Mapping[str, Mapping[str, Any]]) -> CrossParameters:
    """Returns parameters in nested dictionaries as a `CrossParameters`.

    `tree` has the parameters as nested dictionaries of arrays, with the keys that `specifications`
    returns.
    """
    kinds = {
        "raf": segmented.RecurrenceParameters,
        "memory_keys": RnnWeights,
        "memory_values": RnnWeights,
    }
    return CrossParameters(**{name: kinds[name](**arrays) for name, arrays in tree.items()})


def initial_parameters(
    rng: Array, config: CrossConfig, heads: int, head_dim: int
) -> CrossParameters:
    """Returns newly drawn float32 parameters of a layer's cross-attention.

    Args:
      rng: the random key.
      config: settings of cross-attention.
      heads: the number of heads.
      head_dim: the size of a head.
    """
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
        """Returns an array of this shape and dtype with uniform random numbers from -`bound` to
        `bound`, drawn with the key `rng`.
        """
        return jax.random.uniform(rng, shape, dtype, -bound, bound)

    return initialize


def _raf(config: CrossConfig, head_dim: int) -> dict[str, ParameterSpec]:
    constant, results = jax.nn.initializers.constant, {}
    kernel = {
        # PyTorch initializes linear layers like this, and Hugging Face's T5 keeps PyTorch's
        # initialization.
        "uniform": _uniform(head_dim**-0.5),
        # BART initializes all kernels with this standard deviation.
        "normal": jax.nn.initializers.normal(0.02),
    }[config.kernel_init]
    if config.use_raf:
        leak, threshold = config.leak_init, config.threshold_init
        # The settings are the initial leak and threshold that the neurons use. With "bounded", the
        # neurons use a sigmoid of the stored leak, and `smallest_threshold` plus a softplus of the
        # stored threshold, so the stored values are computed by the inverse functions.
        if config.raf_parameters == "bounded":
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
    # PyTorch initializes an RNN in the same way by default.
    initialize = _uniform(width**-0.5)
    return {
        "input_kernel": ParameterSpec((width, width), ("heads", None), initialize),
        "kernel": ParameterSpec((width, width), (None, None), initialize),
        "bias": ParameterSpec((width,), (None,), initialize),
    }
