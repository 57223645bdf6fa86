"""Equal layers as a scan over stacked parameters: traced once, whatever the depth."""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from brt.layers.basic import unrolled


def stacked(
    layer: type[nn.Module],
    count: int,
    *,
    remat: bool,
    methods: Sequence[str] = ("__call__",),
) -> type[nn.Module]:
    """A module of `count` layers with the fields of one, whose parameters have layers on axis 0.

    Its methods are of the form (x, of each layer, of all layers) -> (x, of each layer), where
    what is of each layer has the layers on axis 0. It is a loop but on TPUs, where what a loop
    stacks for its backward pass takes longer to move than to keep.

    Args:
      remat: recomputes the activations of `__call__` in the backward pass.
    """
    if remat:
        layer = nn.remat(layer, methods=["__call__"], prevent_cse=False)
    return nn.scan(
        layer,
        variable_axes={"params": 0},
        split_rngs={"params": True, "dropout": True},
        in_axes=(0, nn.broadcast),
        length=count,
        unroll=unrolled(0, count, 1 if remat else count),
        metadata_params={nn.PARTITION_NAME: "layers"},
        methods=list(methods),
        check_constancy_invariants=False,  # it would trace every layer twice
    )


def layer_keys(key: jax.Array, count: int) -> jax.Array:
    """A key for each layer."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(count))
