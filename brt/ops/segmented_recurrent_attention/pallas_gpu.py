"""The recurrence over segments on GPUs as Pallas kernels for the Triton backend.

XLA first multiplies the values by W, the matrix of the neurons' inputs. The forward kernel has one
program for each tile of columns of the states, head and source. The program loops twice over the
segments: first it adds up the products A_j = K_j^T V_j of all segments j, and then it computes each
product again, from keys and values that are still in the cache, and runs the neurons. If gradients
are needed, the program also writes the membrane potentials.

The backward pass has two kernels. A program of the first one runs over the segments in reverse
order and writes the gradients of the neurons' inputs and their sum over the segments. A program of
the second one computes the gradients of keys and values of one segment. No sum needs atomic
additions, so results are bitwise reproducible. As in `accumulate_fire`, the comparison of a
potential with the threshold has no gradient.

In shapes, B is the number of sources, M of segments, S of source positions of a segment, H of
heads, and K of numbers of a head.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from brt.distributed import rules
from brt.ops.gpu import triton_refusal
from brt.ops.segmented_recurrent_attention import pallas_tpu
from brt.ops.segmented_recurrent_attention.config import CrossConfig
from brt.ops.segmented_recurrent_attention.neurons_gpu import (
    LAUNCHES,
    RecurrenceArguments,
    RecurrenceSettings,
    run_neurons,
)
from brt.ops.segmented_recurrent_attention.recurrence import (
    RecurrenceParameters,
    RecurrentStates,
    leak_and_threshold,
    matmul,
    output_scale,
)

_DTYPES = ("bfloat16", "float16")
_POSITIONS = 16  # The number of positions of a segment must be a multiple of this number.


def feature_refusal(config: CrossConfig) -> str | None:
    """Returns why the kernels do not support these settings, or None if they do.

    Pallas's interpreter needs only this check, because it runs the kernels with any sizes.
    """
    if config.kind in pallas_tpu.WITHOUT_RECURRENCE:
        return f"has no recurrence to compute with CrossAttention.kind = {config.kind!r}"
    return pallas_tpu.feature_refusal(config)


def refusal(config: CrossConfig, size: int, width: int, dtype: jnp.dtype) -> str | None:
    """Returns why the kernels do not support these settings or sizes on GPUs, or None if they do.

    `size` is the number of source positions of a segment, and `width` the size of a head.
    """
    if reason := feature_refusal(config):
        return reason
    if width not in LAUNCHES:
        return f"has heads of 64 or 128, not of {width}"
    if dtype not in _DTYPES:
        return f"computes in bfloat16 and float16, not in {dtype}"
    if size % _POSITIONS:
        return f"has segments of a multiple of {_POSITIONS} tokens, not of {size}"
    return triton_refusal()


def recurrence(
    keys: Float[Array, "M B H S K"],
    values: Float[Array, "M B H S K"],
    counts: Int[Array, " B"],
    parameters: RecurrenceParameters,
    config: CrossConfig,
    *,
    interpret: bool = False,
) -> RecurrentStates:
    """Implements `recurrence.recurrence`."""
    learned = parameters.bias, jnp.stack(leak_and_threshold(parameters, config))
    settings = RecurrenceSettings(config.kv_source != "segment", interpret)
    local = functools.partial(_local, settings=settings)
    if rules.partitioned():
        head_partition = rules.partition_spec(None, "lanes", "heads", None, None, shape=keys.shape)
        lane_partition = P(head_partition[1])
        local = jax.shard_map(
            local,
            in_specs=(head_partition, head_partition, lane_partition, P()),
            out_specs=(head_partition, P(*head_partition[1:3]), P(*head_partition[1:3])),
            axis_names=rules.automatic_axes(), check_vma=False,
        )  # fmt: skip
    states, squares, fired = local(keys, matmul(values, parameters.kernel), counts, learned)
    numbers = counts * math.prod(states.shape[2:])
    rate = jnp.mean(jnp.sum(fired, axis=(1, 2)) / numbers)
    return RecurrentStates(
        states, output_scale(keys, parameters, config, squares[:, :, None]), rate
    )


interpreted = functools.partial(recurrence, interpret=True)


def _local(
    keys: Array, values: Array, counts: Array, learned: tuple, settings: RecurrenceSettings
) -> tuple[Float[Array, "M B H K K"], Float[Array, "B H K"], Float[Array, "B H K"]]:
    """Returns the states, the sums of squared keys, and the numbers of states above 0."""
    bias, neuron = learned
    return run_neurons(RecurrenceArguments(keys, values, bias, neuron, counts), settings)[:3]
