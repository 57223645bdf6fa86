"""The recurrence over segments on TPUs: sums, neurons and membrane potentials stay in VMEM.

The grid is (group of heads, source); a group has as many heads as fill the 128 lanes of a register,
for example two heads of size 64. A step reads the keys and values of a source once and multiplies
the values by W, the matrix of the neurons' inputs. It computes the product K_j^T V_j of the keys
and values of every segment j in VMEM, and runs the neurons over the segments. A step of the
backward kernel repeats this computation, stores the membrane potentials in place of the products,
and then processes the segments in reverse order. As in `accumulate_fire`, the comparison of a
potential with the threshold has no gradient.

In shapes, B is the number of sources, M the number of segments, and S the number of source
positions of a segment. There are H heads of size K. They form N groups, and P = H K / N is the
total width of the heads of a group.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from brt.distributed import rules
from brt.ops import dispatch
from brt.ops.cross_attention.config import CrossConfig
from brt.ops.cross_attention.recurrence import (
    RecurrenceParameters,
    RecurrentStates,
    leak_and_threshold,
    output_scale,
)
from brt.ops.cross_attention.tpu_kernels import (
    NeuronKernelGradients,
    NeuronKernelInputs,
    NeuronKernelOutputs,
    NeuronKernelSettings,
    backward_kernel,
    forward_kernel,
)
from brt.ops.dispatch import output_residual
from brt.ops.tpu import LANES, parallel_heads, vmem_refusal

_HEAD_DIMS = (64, 128)
# These kinds of cross-attention need only the kernels of masked attention, none of this module.
WITHOUT_RECURRENCE = "full", "segmented"


def feature_refusal(config: CrossConfig) -> str | None:
    """Returns why the kernels do not support these settings, or None if they do.

    Pallas's interpreter needs only this check, because it runs the kernels with any sizes.
    """
    if config.kind in WITHOUT_RECURRENCE:
        return None
    if config.kind != "srformer" or not config.use_raf:
        return (
            "is of CrossAttention.kind = 'full', 'segmented' or 'srformer' with its neurons "
            "(use_raf)"
        )
    if config.clamp:
        return "does not clamp sums, as CrossAttention.as_authors = True does for BART"
    return None


def refusal(
    config: CrossConfig, heads: int, width: int, segments: int, dtype: jnp.dtype
) -> str | None:
    """Returns why the kernel does not support these settings or sizes on TPUs, or None if it does.

    `width` is the size of a head.
    """
    if reason := feature_refusal(config):
        return reason
    if width not in _HEAD_DIMS:
        return f"has heads of 64 or 128, not of {width}"
    together, heads = LANES // width, heads // rules.shard_count("heads", heads)
    if heads % together:
        return f"takes heads of {width} in pairs; a device has {heads}"
    if dtype not in (jnp.float32, jnp.bfloat16):
        return f"computes in float32 and bfloat16, not in {dtype}"
    if config.kind in WITHOUT_RECURRENCE:
        return None
    if config.segment_size % 8:
        return f"has segments of a multiple of 8 tokens, not of {config.segment_size}"
    # The blocks of inputs and outputs take two buffers each in VMEM, because Pallas copies one
    # block while the kernel computes another.
    numbers = segments * LANES * (8 * config.segment_size + 2 * width)
    taken = numbers * dtype.itemsize + segments * width * LANES * 4
    return vmem_refusal(taken, "a source")


def recurrence(
    keys: Float[Array, "M B H S K"],
    values: Float[Array, "M B H S K"],
    counts: Int[Array, " B"],
    parameters: RecurrenceParameters,
    config: CrossConfig,
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> RecurrentStates:
    """Implements `recurrence.recurrence`."""
    learned = parameters.kernel, jnp.stack(leak_and_threshold(parameters))
    width = keys.shape[-1]
    settings = NeuronKernelSettings(width, width, config.kv_source != "segment", interpret)
    local: Any = functools.partial(_local, settings=settings)
    if rules.partitioned():
        head_partition = rules.partition_spec(None, "lanes", "heads", None, None, shape=keys.shape)
        lane_partition = P(head_partition[1])
        by_source = P(*head_partition[1:3])
        local = dispatch.on_devices(
            local, (head_partition, head_partition, lane_partition, P()),
            (head_partition, by_source, by_source),
        )  # fmt: skip
    states, squares, fired = local(keys, values, counts, learned)
    numbers = counts * math.prod(states.shape[2:])
    rate = jnp.mean(jnp.sum(fired, axis=1) / numbers)
    return RecurrentStates(
        states, output_scale(keys, parameters, config, squares[:, :, None]), rate
    )


interpreted = functools.partial(recurrence, interpret=True)


class _Arguments(NamedTuple):
    """The arrays of one device from which the states are computed."""

    keys: Float[Array, "B M S HK"]
    values: Float[Array, "B M S HK"]
    # This field and the next are float32.
    kernel: Float[Array, "K K"]
    # Leak and threshold.
    neuron: Float[Array, " 2"]
    counts: Int[Array, " B"]


def _local(
    keys: Array,
    values: Array,
    counts: Array,
    learned: tuple[Array, Array],
    settings: NeuronKernelSettings,
) -> tuple[Float[Array, "M B H K K"], Float[Array, "B H K"], Float[Array, "B H"]]:
    """Returns the states, the sums of squared keys, and the number of states above 0."""
    segments, batch, heads, _, width = keys.shape
    settings = settings._replace(wide=width * math.gcd(heads, max(LANES // width, 1)))
    k, v = (
        x.transpose(1, 0, 3, 2, 4).reshape(batch, segments, -1, heads * width)
        for x in (keys, values)
    )
    results = _run_neurons(_Arguments(k, v, *learned, counts), settings)
    states = results.states.reshape(*results.states.shape[:-1], -1, width)
    states = states.transpose(2, 0, 1, 4, 3, 5).reshape(segments, batch, heads, width, width)
    squares, fired = (x.reshape(batch, heads, width) for x in results[1:])
    return states, squares, jnp.sum(fired, axis=-1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _run_neurons(arguments: _Arguments, settings: NeuronKernelSettings) -> NeuronKernelOutputs:
    """Returns the states [B, N, M, K, P] of all segments, and two sums [B, N, 1, P].

    The sums are the fields `squares` and `fired` of `NeuronKernelOutputs`.
    """
    return _forward(arguments, settings)[0]


def _forward(
    arguments: _Arguments, settings: NeuronKernelSettings
) -> tuple[NeuronKernelOutputs, _Arguments]:
    batch, segments, _, heads = arguments.keys.shape
    steps = heads // settings.wide
    row = jax.ShapeDtypeStruct((batch, steps, 1, settings.wide), jnp.float32)
    shape = batch, steps, segments, settings.width, settings.wide
    specs = _specs(arguments, settings)
    (results,) = pl.pallas_call(
        functools.partial(forward_kernel, settings=settings),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(steps, batch),
            in_specs=[specs._replace(states=None, squares=None)],
            out_specs=[NeuronKernelOutputs(specs.states, specs.squares, specs.squares)],
            scratch_shapes=[pltpu.VMEM(shape[2:], jnp.float32)],
        ),
        out_shape=[
            NeuronKernelOutputs(jax.ShapeDtypeStruct(shape, arguments.keys.dtype), row, row)
        ],
        **_options(arguments, settings, "accumulate_fire", products=2),
    )(arguments.counts, _neuron(arguments), _inputs(arguments, settings))
    return jax.tree.map(output_residual, results), arguments


def _backward(
    settings: NeuronKernelSettings, arguments: _Arguments, gradients: NeuronKernelOutputs
) -> tuple[_Arguments]:
    batch, segments, _, heads = arguments.keys.shape
    steps, width = heads // settings.wide, settings.width
    inputs = _inputs(arguments, settings, states=gradients.states, squares=gradients.squares)
    specs = _specs(arguments, settings)

    def sum_over_sources(rows: int) -> tuple[pl.BlockSpec, jax.ShapeDtypeStruct]:
        # The kernel sums these gradients, [groups of heads, rows, 128], over all sources.
        spec = pl.BlockSpec((None, rows, settings.wide), lambda p, b, *_: (p, 0, 0))
        return spec, jax.ShapeDtypeStruct((steps, rows, settings.wide), jnp.float32)

    added = sum_over_sources(width), sum_over_sources(2)
    like = jax.ShapeDtypeStruct(arguments.keys.shape, arguments.keys.dtype)
    (results,) = pl.pallas_call(
        functools.partial(backward_kernel, settings=settings),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(steps, batch),
            in_specs=[specs],
            out_specs=[
                NeuronKernelGradients(specs.keys, specs.values, *(spec for spec, _ in added))
            ],
            scratch_shapes=[pltpu.VMEM((segments, width, settings.wide), jnp.float32)],
        ),
        out_shape=[NeuronKernelGradients(like, like, *(shape for _, shape in added))],
        **_options(arguments, settings, "accumulate_fire_backward", products=7),
    )(_neuron(arguments), inputs)
    kernel = jnp.sum(
        results.kernel.reshape(steps, width, settings.wide // width, width), axis=(0, 2)
    )
    neuron = jnp.sum(results.neuron, axis=(0, 2))
    return (_Arguments(results.keys, results.values, kernel, neuron, None),)


_run_neurons.defvjp(_forward, _backward)


def _neuron(arguments: _Arguments) -> Float[Array, " 3"]:
    return jnp.append(arguments.neuron, 1 / arguments.neuron[1])


def _inputs(
    arguments: _Arguments, settings: NeuronKernelSettings, **others: Array
) -> NeuronKernelInputs:
    together = settings.wide // settings.width
    kernel = jnp.kron(jnp.eye(together), arguments.kernel).astype(arguments.keys.dtype)
    return NeuronKernelInputs(arguments.keys, arguments.values, kernel, **others)


def _specs(arguments: _Arguments, settings: NeuronKernelSettings) -> NeuronKernelInputs:
    (_, segments, size, _), wide = arguments.keys.shape, settings.wide
    tokens = pl.BlockSpec((None, segments, size, wide), lambda p, b, *_: (b, 0, 0, p))
    kernel = pl.BlockSpec((wide, wide), lambda p, b, *_: (0, 0))
    return NeuronKernelInputs(
        tokens, tokens, kernel,
        pl.BlockSpec(
            (None, None, segments, settings.width, wide), lambda p, b, *_: (b, p, 0, 0, 0)
        ),
        pl.BlockSpec((None, None, 1, wide), lambda p, b, *_: (b, p, 0, 0)),
    )  # fmt: skip


def _options(
    arguments: _Arguments, settings: NeuronKernelSettings, name: str, products: int
) -> dict[str, Any]:
    # The kernel's name tells `brt.planning.kernel_cycles` its kind and the number of its steps.
    keys = arguments.keys
    batch, segments, size, heads = keys.shape
    steps = batch * heads // settings.wide
    return {
        "name": f"{name}_{segments}x{size}x{settings.wide}_{keys.dtype}_{steps}_steps",
        "interpret": settings.interpret,
        "compiler_params": parallel_heads(2),
        "cost_estimate": pl.CostEstimate(
            flops=2 * products * keys.size * settings.width, transcendentals=0,
            bytes_accessed=(products // 2 + 1) * keys.size * keys.dtype.itemsize,
        ),
    }  # fmt: skip
