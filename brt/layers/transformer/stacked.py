"""A stack of equal layers as a scan over their stacked parameters; JAX traces the code of a layer
once, whatever the number of layers.
"""

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
    """Returns a module class that calls `count` layers one after the other.

    The class has the fields of `layer`, and its parameters have the layers on axis 0. The methods
    of the class and of `layer` have the arguments (x, each, shared) and return (x, outputs):

      x: arrays that each layer gets from the layer before and changes. The methods of the class
        return the arrays x of the last layer.
      each, outputs: further arguments and results, which differ between layers. The methods of the
        class take and return these arrays with the layers on axis 0, and the methods of `layer`
        without this axis.
      shared: arrays that all layers read.

    The scan is a loop on CPUs. On accelerators it is unrolled unless `remat` is True (which
    recomputes the activations of `__call__` in the backward pass), because a loop stacks arrays for
    its backward pass.
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
        # Flax's check of constant variables is turned off, because it traces every layer twice.
        check_constancy_invariants=False,
    )


def layer_keys(key: jax.Array, count: int) -> jax.Array:
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(count))
