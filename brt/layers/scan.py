"""A scan over the stacked layers of a run (neighbouring layers of one kind).

This module chooses how far the scan is unrolled, which results are recomputed in the backward pass
instead of being stored, and whether a layer's weight gradients must be computed before the backward
pass of the layers below (`learned_at_once`). The letters of shapes are those of `brt.layers.state`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from brt.config import Model
from brt.config.fields import RematPolicy
from brt.errors import ConfigError
from brt.layers.basic import SHARED, learned_at_once, remat_policy, unrolled
from brt.layers.runs import Run, runs
from brt.layers.state import Given, LayerOutput, with_whole_arrays, written
from brt.ops import dispatch
from brt.ops.dense import are_separate, of_layer

# On CPUs, runs of at most this many layers are unrolled, which is faster than a loop over layers.
# More layers are called in a loop, because they would take long to compile if they were unrolled.
_CPU_LAYERS = 8
# With these `in_axes`, a scan gives all layers the same fields of `Given`.
_SAME = Given(*[nn.broadcast] * len(Given._fields))


def scan_layers(
    layers: nn.Module, run: Run, method: str, x: Float[Array, "B T D"] | None, given: Given, *,
    axis: int = 1, ties: bool = True,
) -> LayerOutput:  # fmt: skip
    """Calls a method of all layers of one run, from the lowest to the highest, by a scan.

    Args:
      x: the vectors of tokens that the run's lowest layer reads, or None.
      given: what the method receives. States have the layers on `axis`, open blocks and model
        states on axis 0. The summaries are for the lowest layer, and the other fields are the same
        for all layers.
      axis: the axis of layers in `given.state` and in the states that are returned. In open blocks,
        the layers are always on axis 0.
      ties: if True, the backward pass may compute a layer's weight gradients before it goes on to
        the layer below (`learned_at_once`). It is False while parameters are initialised.

    Returns:
      The output and the summaries of the highest layer; the states of all layers with the layers on
        `axis`, or open blocks with the layers on axis 0; and auxiliary losses, metrics and model
        states with the layers on axis 0.
    """
    whole, opened = method == "__call__", method not in ("__call__", "end_block")
    at_once = _layers_at_once(run.model, run.layers)
    no_loop = whole and at_once == run.layers
    tied = ties and no_loop and dispatch.policy().ties_gradients
    separate = _has_separate_kernels(layers)
    # Kernels that are separate arrays have no axis of layers over which the scan could loop. The
    # scan then loops over the indices of the layers, and each index chooses a layer's kernels.
    index = jnp.arange(run.layers) if separate else None

    def layer(module: nn.Module, passed: tuple, given: Given, index: Any) -> tuple[tuple, tuple]:
        # Calls one layer. `passed` has x and the summaries, which each layer passes to the layer
        # above. `index` is the layer's index if kernels are separate arrays, otherwise None.
        x, summaries = passed
        given = given._replace(summaries=summaries)
        call = _call_tied if tied else _call
        if method == "decode_step" and not run.layer_kind.reads_chunks:
            call = _call_by_token
        if separate:
            call = partial(_call_separate, call, index)
        output = call(module, method, x, given)
        summaries = summaries if output.summaries is None else output.summaries
        return (output.x, summaries), (output.state, output.aux)

    if whole and (keep := _saved_for_backward(run)):
        # If the scan is unrolled completely, XLA could merge the recomputed operations with the
        # equal operations of the forward pass. `prevent_cse` prevents this.
        layer = nn.remat(layer, prevent_cse=no_loop, policy=remat_policy(keep))
    scan = nn.scan(
        layer,
        variable_axes={} if separate else {"params": 0},
        variable_broadcast="params" if separate else False,
        split_rngs={"params": not separate, "dropout": True, SHARED: True},
        in_axes=(_SAME._replace(state=axis, block=0, model_state=0), 0),
        out_axes=(0 if opened else axis, 0),
        length=run.layers,
        unroll=at_once,
        metadata_params={nn.PARTITION_NAME: "layers"},
        # Flax's check of constant variables is turned off, because it traces every layer twice.
        check_constancy_invariants=False,
    )
    passed = x, given.summaries
    (x, summaries), (state, aux) = scan(layers, passed, given._replace(summaries=None), index)
    if method == "decode_step":
        state = written(given.block, state)
    return LayerOutput(x, state, aux, summaries)


def _has_separate_kernels(layers: nn.Module) -> bool:
    params = layers.variables.get("params", {})
    return any(map(are_separate, jax.tree.leaves(params, is_leaf=are_separate)))


def unrolls_layers(model: Model) -> bool:
    """Returns True if no run of layers of a model is computed in a loop."""
    return all(_layers_at_once(run.model, run.layers) == run.layers for run in runs(model))


def _layers_at_once(model: Model, layers: int) -> int:
    recomputes = model.remat and not model.feedback
    # A loop copies what layers store for the backward pass, so accelerators use none. If layers
    # store only their inputs, however, a loop needs less memory than unrolled layers.
    on_accelerators = 1 if recomputes and model.remat_keep == "nothing" else layers
    on_cpus = 1 if recomputes or layers > _CPU_LAYERS else layers
    return unrolled(model.unroll, layers, on_accelerators, on_cpus)


def _saved_for_backward(run: Run) -> RematPolicy | None:
    # Returns which results layers store for the backward pass in addition to their inputs; None
    # stands for all results.
    if run.model.remat:
        return run.model.remat_keep
    recomputes = dispatch.policy().recomputes_elementwise and not run.layer_kind.loops
    return "products" if recomputes else None


def _call(module: nn.Module, method: str, x: PyTree[Array], given: Given) -> LayerOutput:
    output = getattr(module, method)(x, given)
    _check_output(module, method, output, x, given)
    return output


def _call_separate(
    call: Callable[..., LayerOutput], index: Int[Array, ""], module: nn.Module, method: str,
    x: PyTree[Array], given: Given,
) -> LayerOutput:  # fmt: skip
    # Calls the layer with the index `index`. The module has the parameters of all layers.
    def choose(params: PyTree[Array]) -> PyTree[Array]:
        return jax.tree.map(partial(of_layer, layer=index), params, is_leaf=are_separate)

    chosen = nn.map_variables(
        lambda module: call(module, method, x, given), "params", trans_in_fn=choose
    )
    return chosen(module)


def _call_by_token(
    module: nn.Module, method: str, x: Float[Array, "B T D"], given: Given
) -> LayerOutput:
    if x.shape[1] == 1:
        return _call(module, method, x, given)

    def read_token(
        module: nn.Module, block: PyTree[Array], token: Float[Array, "B D"], i: Int[Array, ""]
    ) -> tuple[PyTree[Array], Float[Array, "B D"]]:
        own = given._replace(block=block, position=given.position + i)
        output: Any = _call(module, method, token[:, None], own)
        return written(block, output.state), output.x[:, 0]

    scan = nn.scan(
        read_token, variable_broadcast="params", split_rngs={"params": False},
        in_axes=(1, 0), out_axes=1,
    )  # fmt: skip
    block, y = scan(module, given.block, x, jnp.arange(x.shape[1]))
    return LayerOutput(y, block)


def _call_tied(module: nn.Module, method: str, x: PyTree[Array], given: Given) -> LayerOutput:
    # The weight gradients of the layer are computed before the backward pass of the layers below.
    tied = []

    def tie(params: PyTree[Array]) -> PyTree[Array]:
        # Passes parameters and inputs through `learned_at_once`; stores the inputs for `call`.
        params, x_tied = learned_at_once(params, (x, given.summaries))
        tied.append(x_tied)
        return params

    def call(module: nn.Module) -> LayerOutput:
        x_tied, summaries = tied[-1]
        return _call(module, method, x_tied, given._replace(summaries=summaries))

    return nn.map_variables(call, "params", trans_in_fn=tie, rngs=True)(module)


# Maps a method to the field of `Given` whose next value the method returns.
_RETURNED = {"__call__": "state", "decode_step": "block", "end_block": "state"}


def _check_output(module: nn.Module, method: str, output: Any, x: Any, given: Given) -> None:
    """Raises ConfigError if a method of a layer returned something wrong.

    The method must return a `LayerOutput`. Each array in it must have the shape and the dtype of
    the array of x or of `given` that it replaces.
    """
    name = f"{type(module).__name__}.{method}"
    if not isinstance(output, LayerOutput):
        raise ConfigError(
            f"{name} returned a {type(output).__name__}; it must return a "
            "brt.layers.state.LayerOutput"
        )
    if x is not None:
        _check_same(name, "x", output.x, x)
    if (argument := _RETURNED.get(method)) is not None:
        before = getattr(given, argument)
        _check_same(name, argument, with_whole_arrays(before, output.state), before)


def _check_same(name: str, argument: str, after: Any, before: Any) -> None:
    form: Any = jax.tree.structure(after)
    expected: Any = jax.tree.structure(before)
    if form != expected:
        raise ConfigError(
            f"{name} returned {_form(after)} in place of {argument}, which was {_form(before)}; "
            "return the same fields"
        )

    def check(path: tuple, new: Any, old: Any) -> None:
        types = [(jnp.shape(x), jnp.result_type(x)) for x in (new, old)]
        if types[0] != types[1]:
            (shape, dtype), (old_shape, old_dtype) = types
            field = jax.tree_util.keystr(path, simple=True, separator=".")
            shown = f"{argument}.{field}" if field else argument
            remedy = f"; convert it, for example by .astype({old_dtype})"
            raise ConfigError(
                f"{name} got {shown} as {old_dtype}{list(old_shape)} and returned "
                f"{dtype}{list(shape)}{remedy if shape == old_shape else ''}"
            )

    jax.tree.map_with_path(check, after, before)


def _form(value: Any) -> str:
    # Returns the name of a value's type and, for a NamedTuple, the names of its fields that are not
    # None.
    fields = [field for field in getattr(value, "_fields", ()) if getattr(value, field) is not None]
    return type(value).__name__ + (f"({', '.join(fields)})" if fields else "")
