"""Parameters with a separate array for each layer, with which CPUs generate text faster.

`brt.ops.layer_kernel` says why. The separate arrays are views of the memory of the stacks, so they
need no memory of their own.
"""

from typing import Any

import jax
import numpy as np
from jaxtyping import Array, PyTree

from brt.config import Model
from brt.layers.runs import runs
from brt.ops import dispatch
from brt.types import Variables

# The kernels of a layer that only products read (`brt.layers.basic.product_kernel`), by name.
_KERNELS = frozenset(
    {"queries", "keys", "values", "cross_queries", "output", "mlp_in", "mlp_gate", "mlp_out"}
)
# Kernels of fewer bytes stay in the caches of a processor from token to token. To copy them costs
# little, and a conditional with many branches takes longer to compile.
_SMALLEST = 1 << 25


def with_separate_kernels(model: Model, variables: Variables) -> Variables:
    """Returns variables with a list of arrays, one for each layer, in place of every large stack of
    kernels, if the programs that read and write token by token are faster with them.

    The lists are for `decode_step` and `prepare_block` of a decoder. While they exist, a program
    cannot reuse the memory of the stacks, as a train step would do.

    Args:
      model: the settings of the model.
      variables: the learned arrays of the model, with stacks of layers.
    """
    leaves = jax.tree.leaves(variables.params)
    whole = all(isinstance(leaf, jax.Array) and len(leaf.devices()) == 1 for leaf in leaves)
    if not dispatch.policy().copies_layers or not whole:
        return variables
    params = dict(variables.params)
    params["stack"] = dict(params["stack"])
    for run in runs(model):
        params["stack"][run.name] = _separated(params["stack"][run.name])
    return variables._replace(params=params)


def _separated(params: dict[str, Any]) -> dict[str, Any]:
    """Returns the parameters of a run of layers, with lists in place of its kernels."""
    tokens = params.get("tokens", {})
    kernels = {name: leaf for name, leaf in tokens.items() if name in _KERNELS and len(leaf) > 1}
    if sum(leaf.nbytes for leaf in kernels.values()) < _SMALLEST:
        return params
    separate = {name: _layers(leaf) for name, leaf in kernels.items()}
    return {**params, "tokens": {**tokens, **separate}}


def _layers(stack: Array) -> list[PyTree[Array]]:
    """Returns the layers of a stack; on CPUs, they share its memory."""
    return [jax.device_put(layer) for layer in np.asarray(stack)]
