"""The stack of layers of a decoder: a scan over each run of neighbouring layers of one kind."""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from brt.config import Kernels, Model
from brt.config.checks import check
from brt.config.fields import RematPolicy
from brt.distributed.rules import Names, constrain
from brt.layers import kinds
from brt.layers.basic import (
    BLOCKS_AT_ONCE,
    SHARED,
    compute_dtype,
    learned_at_once,
    parameter,
    remat_policy,
    unrolled,
)
from brt.layers.kinds import LayerAux
from brt.layers.state import LayerState, Stream, with_unit_keys
from brt.ops import deferred, dispatch
from brt.ops.recurrent_attention import StateKV
from brt.ops.window_attention import normalizes_in_kernel

# One entry per run of equal layers. The batch is on axis 0, the layers of the run on axis 1.
StackState = tuple[LayerState, ...]
StackBlock = tuple[PyTree[Array], ...]
_CPU_LAYERS = 6  # of a run, that CPUs read without a loop: a loop over more compiles sooner
# Of the runs that have one, by name; the layers of the run on axis 0.
ModelState = Mapping[str, PyTree[Array]]


def runs(model: Model) -> list[tuple[str, str, int]]:
    """Returns the runs of neighbouring layers of one kind: (name, kind, number of layers).

    Raises:
      ConfigError: a kind does not exist, or Model.feedback is set and no layer has states to feed
        back.
    """
    recurs = [kinds.of(kind).recurs for kind in model.layer_types]
    check(
        not model.feedback or any(recurs),
        f"Model.feedback = True needs a layer that recurs; none of {model.layer_types} does",
    )
    result, first = [], 0
    for kind, group in groupby(model.layer_types):
        count = len(list(group))
        result.append((f"{kind}_{first}", kind, count))
        first += count
    return result


def new_stack_state(model: Model, batch: int, dtype: jnp.dtype) -> StackState:
    """Returns the state of a stack that has read nothing."""

    def stacked(kind: str, count: int) -> LayerState:
        layer = kinds.of(kind).new_state(model, batch, dtype)
        return jax.tree.map(lambda leaf: jnp.repeat(leaf[:, None], count, axis=1), layer)

    return tuple(stacked(kind, count) for _, kind, count in runs(model))


def state_axes(model: Model) -> StackState:
    """Returns the names of the axes of a stack's state, for sharding."""

    def stacked(leaf: Names) -> Names:
        return (*leaf[:1], "layers", *leaf[1:])

    axes = (kinds.of(kind).axes for _, kind, _ in runs(model))
    return tuple(jax.tree.map(stacked, own, is_leaf=_is_names) for own in axes)


def _is_names(leaf: Any) -> bool:
    return type(leaf) is tuple


def new_model_state(model: Model) -> ModelState:
    """Returns what the layers learn without gradients, at step 0."""
    having = ((name, kinds.of(kind).new_model_state, n) for name, kind, n in runs(model))
    return {
        name: jax.tree.map(lambda leaf, n=n: jnp.repeat(leaf[None], n, axis=0), new(model))
        for name, new, n in having
        if new is not None
    }


def settled(model: Model, model_state: ModelState) -> ModelState:
    """Returns the model state of the next step (see `LayerKind.settle`)."""
    kind_of = {name: kinds.of(kind) for name, kind, _ in runs(model)}
    return {name: kind_of[name].settle(model, own) for name, own in model_state.items()}


def parts(model: Model) -> set[str]:
    """Returns the parts that the state of a model consists of: "cache", "state", "memory"."""
    return set().union(*(kinds.of(kind).parts for kind in model.layer_types))


def replace_parts(
    model: Model, state: StackState, donor: StackState, replaced: Collection[str]
) -> StackState:
    """Returns `state` with the parts named in `replaced` taken from `donor`."""

    triples = zip(runs(model), state, donor, strict=True)
    return tuple(
        kinds.replace_parts(kinds.of(kind), own, other, replaced)
        for (_, kind, _), own, other in triples
    )


def _kept(model: Model, kind: str) -> RematPolicy | None:
    """Returns what layers store for their backward pass besides their inputs; None stores
    everything.
    """
    if model.remat:
        return model.remat_keep
    recomputes = dispatch.policy().recomputes_elementwise and not kinds.of(kind).loops
    return "products" if recomputes else None


def _defers() -> bool:
    """Returns True on accelerators, which defer the weight gradients of loops."""
    return dispatch.policy().defers_gradients


def _call(module: nn.Module, method: str, *given: Any) -> Any:
    return getattr(module, method)(*given)


def _call_tied(module: nn.Module, method: str, x: PyTree[Array], *given: Any) -> Any:
    """Calls a layer so that its weight gradients are computed before those below it."""
    tied = []

    def tie(params: PyTree[Array]) -> PyTree[Array]:
        params, x_tied = learned_at_once(params, x)
        tied.append(x_tied)
        return params

    def call(module: nn.Module) -> Any:
        return _call(module, method, tied[-1], *given)

    return nn.map_variables(call, "params", trans_in_fn=tie, rngs=True)(module)


class Stack(nn.Module):
    """All layers of `model.layer_types`: (x, state) -> (y, state, aux)."""

    model: Model
    training: bool = False
    kernels: Kernels = Kernels()

    def setup(self) -> None:
        places = runs(self.model)
        self.runs = [
            kinds.of(kind).module(self.model, self.training, self.kernels, name=name)
            for name, kind, _ in places
        ]
        if self.model.feedback:
            self.feedback_source = max(
                i for i, (_, k, _) in enumerate(places) if kinds.of(k).recurs
            )
        counts = [kinds.of(kind).summaries for _, kind, _ in places]
        if number := next((count(self.model) for count in counts if count), 0):
            self.summaries = parameter(
                self, "summaries", (number, self.model.model_dim),
                ("states", "embed"), nn.initializers.truncated_normal(0.25),
            )  # fmt: skip

    def _lowest_summaries(self, lanes: int, blocks: int) -> Float[Array, "B N U D"] | None:
        """Returns the learned summaries for every block, or None in models without any."""
        if not any(kinds.of(kind).summaries for kind in self.model.layer_types):
            return None
        learned = self.summaries.astype(compute_dtype(self.model))
        return jnp.broadcast_to(learned, (lanes, blocks, *learned.shape))

    def _at_once(self, count: int) -> int:
        """Returns the number of layers per iteration of a scan, if no setting gives it."""
        every = count if self.model.feedback or not self.model.remat else 1
        few = every if count <= _CPU_LAYERS else 1
        return unrolled(self.model.layer_unroll, count, every, few)

    def _through(
        self, run: int, method: str, stream: Stream, inputs: PyTree, *shared: Any,
        model_state: ModelState, taps: PyTree[Array] = None, axis: int = 1,
    ) -> tuple[Stream, PyTree, LayerAux]:  # fmt: skip
        """Calls a method of all layers of one run by a scan over its layers, whose carry is the
        stream.

        Args:
          inputs: arrays of each layer, with the layers on `axis`; `shared` are the same for all
            layers.
          taps: accumulators of deferred weight gradients, with the layers on axis 0, or None.
        """
        name, kind, count = runs(self.model)[run]
        learns, sums_up = kinds.of(kind).new_model_state is not None, kinds.of(kind).summaries

        def layer(
            module: nn.Module, stream: Stream, inputs: PyTree, learnt: PyTree, taps: PyTree,
            *shared: Any,
        ) -> tuple[Stream, tuple[PyTree, LayerAux]]:  # fmt: skip
            known, x = (learnt,) if learns else (), stream if sums_up else stream.tokens
            tapped = () if taps is None else (taps,)
            given = inputs, *shared, *known, *tapped
            call = _call_tied if ties else _call
            x, after, *aux = call(module, method, x, *given)
            return x if sums_up else stream._replace(tokens=x), (after, *(aux or [LayerAux()]))

        at_once = self._at_once(count)
        no_loop = at_once == count and method == "__call__"
        ties = no_loop and taps is None and _defers() and not self.is_initializing()
        if (keep := _kept(self.model, kind)) and method == "__call__":
            # Where no loop parts forward from backward, the compiler would find both the same.
            layer = nn.remat(layer, prevent_cse=no_loop, policy=remat_policy(keep))
        scan = nn.scan(
            layer,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True, SHARED: True},
            in_axes=(axis, 0, 0, nn.broadcast, nn.broadcast),
            out_axes=(axis, 0),
            length=count,
            unroll=at_once,
            metadata_params={nn.PARTITION_NAME: "layers"},
            check_constancy_invariants=False,  # it would trace every layer twice
        )
        learnt = model_state[name] if learns else ()
        stream, (after, aux) = scan(self.runs[run], stream, inputs, learnt, taps, *shared)
        return stream, after, aux

    def __call__(
        self,
        x: Float[Array, "B T D"],
        state: StackState,
        document_start: Bool[Array, "B N"],
        model_state: ModelState,
    ) -> tuple[Float[Array, "B T D"], StackState, LayerAux]:
        """Reads a segment; sums losses over layers and averages metrics over runs."""
        if self.model.feedback:
            return self._block_by_block(x, state, document_start, model_state)
        return self._layer_by_layer(x, state, document_start, model_state)

    def _layer_by_layer(
        self,
        x: Float[Array, "B T D"],
        state: StackState,
        document_start: Bool[Array, "B N"],
        model_state: ModelState,
        feedback: StateKV | None = None,
        taps: Sequence[PyTree[Array]] | None = None,
        first: int = 0,
        axis: int = 1,
    ) -> tuple[Float[Array, "B T D"], StackState, LayerAux]:
        """Reads a segment through the runs that `state` belongs to, starting with run `first`."""
        after, learnt, losses, metrics = [], {}, {}, {}
        stream = Stream(x, self._lowest_summaries(*document_start.shape))
        places = runs(self.model)[first : first + len(state)]
        for i, (name, _, _) in enumerate(places):
            stream, run_state, aux = self._through(
                first + i, "__call__", stream, state[i], document_start, feedback,
                model_state=model_state, taps=taps and taps[i], axis=axis,
            )  # fmt: skip
            after.append(run_state)
            learnt |= {name: aux.model_state} if name in model_state else {}
            for loss, values in aux.losses.items():
                losses[loss] = losses.get(loss, 0.0) + jnp.sum(values)
            metrics |= {f"{name}/{metric}": jnp.mean(v) for metric, v in aux.metrics.items()}
        return stream.tokens, tuple(after), LayerAux(learnt, losses, metrics)

    def _block_by_block(
        self,
        x: Float[Array, "B T D"],
        state: StackState,
        document_start: Bool[Array, "B N"],
        model_state: ModelState,
    ) -> tuple[Float[Array, "B T D"], StackState, LayerAux]:
        """Reads a segment block by block, because with feedback the lowest layer attends to states
        of the recurrent layer after the previous block. Layers above that one read the whole
        segment.
        """
        serial = self.feedback_source + 1
        scan = nn.scan(
            Stack._read_block,
            variable_broadcast="params",
            split_rngs={"params": False, "dropout": True, SHARED: False},
            in_axes=(1, 1, 0),
            out_axes=(1, 1, 0),
            unroll=unrolled(self.model.block_unroll, document_start.shape[1], BLOCKS_AT_ONCE),
            check_constancy_invariants=self.is_initializing(),  # a second trace makes parameters
        )
        x = constrain(x, "lanes", None, None)  # one block after the other: nobody has his own
        blocks = x.reshape(x.shape[0], -1, self.model.window, x.shape[-1])
        below, taps = _turned(state[:serial]), self._taps(*blocks.shape[:2])
        carry = below, model_state
        (below, learnt), (y, feedback, aux) = scan(self, carry, blocks, document_start, taps)
        y, above, more = self._layer_by_layer(
            y.reshape(x.shape), state[serial:], document_start, learnt, feedback, first=serial
        )
        losses, metrics = (jax.tree.map(jnp.mean, values) for values in aux)
        for loss, value in more.losses.items():
            losses[loss] = losses.get(loss, 0.0) + value
        learnt = {**learnt, **more.model_state}
        state = (*_turned(below), *above)
        if (
            self.model.normalize_qk and normalizes_in_kernel()
        ):  # what blocks have handed on as it was
            state = with_unit_keys(state)
        return y, state, LayerAux(learnt, losses, metrics | more.metrics)

    def _taps(self, lanes: int, blocks: int) -> list[PyTree[Array]] | None:
        """Returns accumulators of deferred weight gradients, or None if none are deferred."""
        if self.is_initializing() or not _defers():
            return None
        params = self.variables["params"]
        places = [
            (name, kinds.of(kind)) for name, kind, _ in runs(self.model)[: self.feedback_source + 1]
        ]
        return [
            kind.taps and kind.taps(self.model, params[name], blocks, lanes)
            for name, kind in places
        ]

    def _read_block(
        self,
        carry: tuple[StackState, ModelState],
        x: Float[Array, "B W D"],
        start: Bool[Array, " B"],
        taps: Sequence[PyTree[Array]] | None,
    ) -> tuple[tuple[StackState, ModelState], tuple[Float[Array, "B W D"], StateKV, tuple]]:
        state, model_state = carry
        feedback_source = self.feedback_source
        _, opened, _ = self._through(
            feedback_source, "begin_block", Stream(None), state[feedback_source], start, None,
            model_state=model_state, axis=0,
        )  # fmt: skip
        feedback = _feedback(opened, axis=0)
        heard, own = jax.tree.map(lambda part: part[:, None], feedback), deferred.of_step(taps)
        x, state, aux = self._layer_by_layer(
            x, state, start[:, None], model_state, heard, own, axis=0
        )
        return (state, {**model_state, **aux.model_state}), (x, feedback, (aux.losses, aux.metrics))

    def begin_block(self, state: StackState, model_state: ModelState) -> StackBlock:
        """Returns empty open blocks behind `state`, which `decode_step` fills."""
        nothing = Stream(None)
        return tuple(
            self._through(run, "begin_block", nothing, own, None, None, model_state=model_state)[1]
            for run, own in enumerate(state)
        )

    def decode_step(
        self,
        x: Float[Array, "B 1 D"],
        state: StackState,
        block: StackBlock,
        position: Int[Array, ""],
        model_state: ModelState,
    ) -> tuple[Float[Array, "B 1 D"], StackBlock]:
        """Reads one token into the open blocks."""
        feedback = _feedback(block[self.feedback_source]) if self.model.feedback else None
        stream, after = Stream(x), []
        for run, pair in enumerate(zip(state, block, strict=True)):
            stream, opened, _ = self._through(
                run, "decode_step", stream, pair, position, feedback, model_state=model_state
            )
            after.append(opened)
        return stream.tokens, tuple(after)

    def end_block(
        self, state: StackState, block: StackBlock, model_state: ModelState
    ) -> StackState:
        """Returns the state after full blocks. Summaries of the blocks travel up
        the layers here.
        """
        lanes = len(jax.tree.leaves(state)[0])
        stream, after = Stream(None, self._lowest_summaries(lanes, 1)), []
        for run, pair in enumerate(zip(state, block, strict=True)):
            stream, ended, _ = self._through(
                run, "end_block", stream, pair, None, None, model_state=model_state
            )
            after.append(ended)
        return tuple(after)


def _turned(state: StackState) -> StackState:
    """Exchanges axes 0 and 1 (lanes and layers) of every array of a state."""
    return jax.tree.map(lambda leaf: leaf.swapaxes(0, 1), state)


def _feedback(opened: Any, axis: int = 1) -> StateKV:
    """Returns the keys and values [B, S, H, K] of the states of the last layer of a run."""
    last = partial(jax.lax.index_in_dim, index=-1, axis=axis, keepdims=False)
    return jax.tree.map(last, opened.memory)
