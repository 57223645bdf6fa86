"""Parameters with a separate array for each layer, with which CPUs generate text faster.

`brt.ops.layer_kernel` says why. The separate arrays are either views of the memory of the stacks,
which need no memory of their own, or transposed copies, with which products of at least eight texts
are faster (`brt.ops.few_rows`).
"""

import math
from typing import Any, TypeAlias

import jax
import numpy as np
from jaxtyping import Array

from brt.config import Model
from brt.layers.runs import runs
from brt.ops import dispatch
from brt.ops.layer_kernel import SeparateKernels
from brt.types import Variables

# The separate kernels of a model, by the name of the run of layers and the name of the parameter.
Kernels: TypeAlias = dict[str, dict[str, SeparateKernels]]

# The kernels of a layer that only products read (`brt.layers.basic.product_kernel`), by name. The
# products with the first kernels sum over the first axis, those with the others over all axes but
# the last.
_FROM_WIDTH = frozenset({"queries", "keys", "values", "cross_queries", "mlp_in", "mlp_gate"})
_TO_WIDTH = frozenset({"output", "mlp_out"})
# Kernels of fewer bytes stay in the caches of a processor from token to token. To copy them costs
# little, and a conditional with many branches takes longer to compile.
_SMALLEST = 1 << 25
# Products of fewer texts gain too little from transposed kernels to be worth copies of them. Copies
# of more bytes could fill the memory of a small machine.
_FEWEST_TEXTS, _MOST_COPIED = 8, 1 << 30


def transposed_kernels(model: Model, variables: Variables, lanes: int) -> Kernels:
    """Returns transposed copies of all large kernels for `with_separate_kernels`.

    The result is empty if the copies do not pay: for fewer than eight texts (`lanes`), for models
    with small kernels, and on other backends than CPUs. It is also empty if the copies would take
    more than 1 GiB. `variables` has stacks of layers of a decoder.
    """
    large = _large_stacks(model, variables)
    if lanes < _FEWEST_TEXTS or sum(map(_bytes, large.values())) > _MOST_COPIED:
        return {}
    return {
        run: {name: _transposed(stack, _input_axes(name, stack)) for name, stack in stacks.items()}
        for run, stacks in large.items()
    }


def with_separate_kernels(model: Model, variables: Variables, copies: Kernels) -> Variables:
    """Returns variables with `SeparateKernels` in place of every large stack of kernels.

    This is so only where the programs that read and write token by token (`decode_step` and
    `prepare_block` of a decoder) are faster with them. `copies` is the result of
    `transposed_kernels`; where there are no copies, the arrays are views of the stacks. While views
    exist, a program cannot reuse the memory of the stacks, as a train step would do.
    """
    params = dict(variables.params)
    for run, stacks in _large_stacks(model, variables).items():
        separate = copies.get(run) or {name: _views(stack) for name, stack in stacks.items()}
        of_run = params["stack"][run]
        tokens = {**of_run["tokens"], **separate}
        params["stack"] = {**params["stack"], run: {**of_run, "tokens": tokens}}
    return variables._replace(params=params)


def _large_stacks(model: Model, variables: Variables) -> dict[str, dict[str, Array]]:
    """Returns the large stacks of kernels by run and parameter; none where stacks cost nothing."""
    leaves = jax.tree.leaves(variables.params)
    whole = all(isinstance(leaf, jax.Array) and len(leaf.devices()) == 1 for leaf in leaves)
    if not dispatch.policy().copies_layers or not whole:
        return {}
    stacks = {run.name: _kernels(variables.params["stack"][run.name]) for run in runs(model)}
    return {run: kernels for run, kernels in stacks.items() if _bytes(kernels) >= _SMALLEST}


def _kernels(params: dict[str, Any]) -> dict[str, Array]:
    """Returns the stacks of kernels in the parameters of a run of several layers."""
    tokens = params.get("tokens", {})
    names = _FROM_WIDTH | _TO_WIDTH
    return {name: leaf for name, leaf in tokens.items() if name in names and len(leaf) > 1}


def _bytes(stacks: dict[str, Array]) -> int:
    return sum(stack.nbytes for stack in stacks.values())


def _input_axes(name: str, stack: Array) -> int:
    """Returns the number of axes of a layer's kernel that its product sums over."""
    return stack.ndim - 2 if name in _TO_WIDTH else 1


def _views(stack: Array) -> SeparateKernels:
    """Returns the layers of a stack; on CPUs, they share its memory."""
    layers = tuple(jax.device_put(layer) for layer in np.asarray(stack))
    return SeparateKernels(layers, stack.shape[1:])


def _transposed(stack: Array, inputs: int) -> SeparateKernels:
    """Returns transposed copies of the L layers of a stack [L, *inputs, *outputs], as matrices."""
    rows = math.prod(stack.shape[1 : 1 + inputs])
    matrices = np.asarray(stack).reshape(len(stack), rows, -1)
    copies = tuple(jax.device_put(np.ascontiguousarray(matrix.T)) for matrix in matrices)
    return SeparateKernels(copies, stack.shape[1:], transposed=inputs)
