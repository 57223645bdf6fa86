"""Equal layers as a scan over stacked parameters, which is traced once for any depth."""

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
    """Returns a module of `count` layers with the fields of one layer, whose parameters have the
    layers on axis 0.

    Its methods have the form (x, inputs of each layer, inputs of all layers) -> (x, outputs of each
    layer), where arrays of each layer have the layers on axis 0. The layers are a loop except on
    TPUs, where moving what a loop stacks for its backward pass takes too long.

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
        check_constancy_invariants=False,  # The check would trace every layer twice.
    )


def layer_keys(key: jax.Array, count: int) -> jax.Array:
    """Returns a random key for each layer."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(count))
