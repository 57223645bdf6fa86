"""The calls of the Triton kernels of the segmented recurrence, and their derivative.

The module `pallas_gpu` describes the algorithm. In shapes, B is the number of sources, M of
segments, S of source positions of a segment, H of heads, and K of numbers of a head.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from brt.ops.dispatch import output_residual
from brt.ops.gpu import LaunchShape
from brt.ops.segmented_recurrent_attention import gpu_kernels
from brt.ops.segmented_recurrent_attention.gpu_kernels import (
    NeuronTileInputs,
    NeuronTileOutputs,
    PotentialTileGradients,
    PotentialTileInputs,
    ProductTileInputs,
)


class _Launches(NamedTuple):
    """The launch parameters of each kernel for one head size."""

    forward: LaunchShape
    potentials: LaunchShape
    products: LaunchShape


# With these parameters, the compiler for sm_90a (H100, H200) spills no registers.
LAUNCHES = {
    64: _Launches(LaunchShape(64, 64, 4, 3), LaunchShape(16, 64, 4, 3), LaunchShape(64, 64, 4, 2)),
    128: _Launches(
        LaunchShape(64, 64, 8, 3), LaunchShape(8, 128, 4, 3), LaunchShape(64, 128, 8, 2)
    ),
}


class RecurrenceSettings(NamedTuple):
    """Static settings."""

    # True if the input of a segment's neurons is the sum of A_i over all other segments, False if
    # the input is A_j of the segment itself.
    remaining: bool
    interpret: bool


class RecurrenceArguments(NamedTuple):
    """The arrays of one device that states are computed from."""

    keys: Float[Array, "M B H S K"]
    # The values are already multiplied by W.
    values: Float[Array, "M B H S K"]
    bias: Float[Array, " K"] | None
    # Leak and threshold; they and the bias are float32.
    neuron: Float[Array, " 2"]
    counts: Int[Array, " B"]

    def launches(self) -> _Launches:
        """Returns the launch parameters of the kernels, with tiles that divide these sizes.

        Interpreted kernels also have heads and segments of other sizes.
        """
        size, width = self.keys.shape[3:]
        forward, potentials, products = LAUNCHES.get(width, LAUNCHES[64])
        return _Launches(
            forward._replace(
                rows=math.gcd(size, forward.rows), columns=math.gcd(width, forward.columns)
            ),
            potentials._replace(rows=math.gcd(width, potentials.rows)),
            products._replace(rows=math.gcd(size, products.rows)),
        )

    def with_inverse(self) -> Float[Array, " 3"]:
        """Returns leak, threshold, and 1 divided by the threshold."""
        return jnp.append(self.neuron, 1 / self.neuron[1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def run_neurons(arguments: RecurrenceArguments, settings: RecurrenceSettings) -> NeuronTileOutputs:
    """Returns the outputs of the forward kernel for all heads and sources, without potentials."""
    return _outputs(arguments, settings, with_potentials=False)


def _outputs(
    arguments: RecurrenceArguments, settings: RecurrenceSettings, *, with_potentials: bool
) -> NeuronTileOutputs:
    keys, launch = arguments.keys, arguments.launches().forward
    *leading, _, width = keys.shape
    row = jax.ShapeDtypeStruct((*leading[1:], width), jnp.float32)
    states = jax.ShapeDtypeStruct((*leading, width, width), keys.dtype)
    (outputs,) = _call(
        functools.partial(
            gpu_kernels.segmented_recurrence_forward, launch=launch, remaining=settings.remaining
        ),
        settings, launch, width // launch.columns,
        NeuronTileInputs(
            keys, arguments.values, arguments.with_inverse(), arguments.counts[:, None],
            arguments.bias,
        ),
        [NeuronTileOutputs(states, row, row, _float32(states) if with_potentials else None)],
        flops=4 * keys.size * width,
    )  # fmt: skip
    return outputs


def _forward(
    arguments: RecurrenceArguments, settings: RecurrenceSettings
) -> tuple[NeuronTileOutputs, tuple[RecurrenceArguments, Array]]:
    outputs = jax.tree.map(output_residual, _outputs(arguments, settings, with_potentials=True))
    return outputs._replace(potentials=None), (arguments, outputs.potentials)


def _backward(
    settings: RecurrenceSettings,
    residuals: tuple[RecurrenceArguments, Array],
    gradients: NeuronTileOutputs,
) -> tuple[RecurrenceArguments]:
    arguments, potentials = residuals
    keys, launches = arguments.keys, arguments.launches()
    (segments, batch, heads, _, width), launch = keys.shape, launches.potentials
    row = jax.ShapeDtypeStruct((batch, heads, width), jnp.float32)
    # The gradients of X are rounded to the dtype of the keys only if nothing is added to them.
    own = _float32(potentials) if settings.remaining else _like(gradients.states)
    (found,) = _call(
        functools.partial(gpu_kernels.segmented_recurrence_potentials, launch=launch),
        settings, launch, width // launch.rows,
        PotentialTileInputs(potentials, gradients.states, arguments.with_inverse()),
        [PotentialTileGradients(own, _float32(potentials[0]), row, row)], flops=0,
    )  # fmt: skip
    d_keys, d_values = _call(
        functools.partial(gpu_kernels.segmented_recurrence_products, launch=launches.products),
        settings, launches.products, segments,
        ProductTileInputs(
            keys, arguments.values, found.own, found.total if settings.remaining else None,
            gradients.squares,
        ),
        [_like(keys), _like(keys)], flops=4 * keys.size * width, by_segment=True,
    )  # fmt: skip
    d_bias = None if arguments.bias is None else jnp.sum(found.total, axis=(0, 1, 2))
    d_neuron = jnp.stack([jnp.sum(found.leak), jnp.sum(found.threshold)])
    return (RecurrenceArguments(d_keys, d_values, d_bias, d_neuron, None),)


run_neurons.defvjp(_forward, _backward)


def _like(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _float32(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, jnp.float32)


def _block_spec(x: Any, by_segment: bool) -> pl.BlockSpec:
    """Returns the block of an array [M, B, H, *, *], [B, H, ...], [B, 1] or [*].

    The block has all numbers of a head and source, or if `by_segment` is True, those of a segment.
    """
    if x.ndim == 1:
        return pl.BlockSpec(x.shape, lambda _, h, b: (0,))
    if x.ndim == 2:
        return pl.BlockSpec((None, 1), lambda _, h, b: (b, 0))
    if x.ndim == 5:
        first = None if by_segment else x.shape[0]
        return pl.BlockSpec(
            (first, None, None, *x.shape[3:]),
            lambda i, h, b: (i if by_segment else 0, b, h, 0, 0),
        )
    rest = x.shape[2:]
    return pl.BlockSpec((None, None, *rest), lambda _, h, b: (b, h, *(0 for _ in rest)))


def _call(
    kernel: Callable[..., None],
    settings: RecurrenceSettings,
    launch: LaunchShape,
    tiles: int,
    inputs: Any,
    outputs: list[Any],
    *,
    flops: int,
    by_segment: bool = False,
) -> tuple[Any, ...]:
    """Calls a kernel on a grid of (tile, head, source).

    Args:
      tiles: the number of programs of a head and source.
      inputs: the first one is an array [M, B, H, *, *].
      flops: the number of operations of the kernel's matrix products.
      by_segment: True if a program sees only one segment.
    """
    _, batch, heads, *_ = inputs[0].shape
    block_spec = functools.partial(_block_spec, by_segment=by_segment)
    arrays = jax.tree.leaves((inputs, outputs))
    return pl.pallas_call(
        kernel,
        grid=(tiles, heads, batch), in_specs=[jax.tree.map(block_spec, inputs)],
        out_specs=jax.tree.map(block_spec, outputs), out_shape=outputs,
        interpret=settings.interpret, compiler_params=launch.compiler_params(),
        cost_estimate=pl.CostEstimate(
            flops=flops, transcendentals=0,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in arrays),
        ),
    )(inputs)  # fmt: skip
