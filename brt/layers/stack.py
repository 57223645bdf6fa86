"""The stack of layers of a decoder: a scan over each run of neighbouring layers of one kind.

The model state is statistics that layers learn without gradients. In some models, a layer also
passes summaries of each block to the layer above: U vectors for each of N blocks.
"""

from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.config import Kernels, Model
from brt.distributed.rules import constrain
from brt.layers.basic import BLOCKS_AT_ONCE, SHARED, compute_dtype, parameter, unrolled
from brt.layers.runs import ModelState, StackBlock, StackState, runs
from brt.layers.scan import scan_layers
from brt.layers.state import Given, LayerAux, LayerOutput
from brt.ops.recurrent_attention import StateKV


class StackOutput(NamedTuple):
    """The result of reading a segment. For each run of layers (adjacent layers of one kind), `aux`
    has the model state and the means of metrics. It also has losses summed over all layers.
    """

    x: Float[Array, "B T D"]
    state: StackState
    aux: LayerAux


class Stack(nn.Module):
    """All layers of a decoder, with the methods of a layer (`brt.layers.kinds.LayerKind`). Its
    methods take and return the states and open blocks of all runs (`brt.layers.runs`).
    """

    model: Model
    training: bool = False
    kernels: Kernels = Kernels()

    def setup(self) -> None:
        self.run_specs = runs(self.model)
        self.runs = [
            run.layer_kind.module(run.model, self.training, self.kernels, name=run.name)
            for run in self.run_specs
        ]
        if self.model.feedback:
            self.feedback_source = max(
                i for i, run in enumerate(self.run_specs) if run.layer_kind.recurs
            )
        counts = [run.layer_kind.summaries for run in self.run_specs]
        self.summary_count = next((count(self.model) for count in counts if count), 0)
        if self.summary_count:
            self.summaries = parameter(
                self, "summaries", (self.summary_count, self.model.model_dim),
                ("states", "embed"), nn.initializers.truncated_normal(0.25),
            )  # fmt: skip

    def _lowest_summaries(self, lanes: int, blocks: int) -> Float[Array, "B N U D"] | None:
        # The lowest layer reads learned summaries, which are the same for every block.
        if not self.summary_count:
            return None
        learned = self.summaries.astype(compute_dtype(self.model))
        return jnp.broadcast_to(learned, (lanes, blocks, *learned.shape))

    def _scan(
        self, run: int, method: str, x: Float[Array, "B T D"] | None, given: Given,
        model_state: ModelState, axis: int = 1,
    ) -> LayerOutput:  # fmt: skip
        spec = self.run_specs[run]
        given = given._replace(model_state=model_state.get(spec.name, ()))
        ties = not self.is_initializing()
        return scan_layers(self.runs[run], spec, method, x, given, axis=axis, ties=ties)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        state: StackState,
        document_start: Bool[Array, "B N"],
        model_state: ModelState,
    ) -> StackOutput:
        read = self._block_by_block if self.model.feedback else self._layer_by_layer
        return read(x, state, document_start, model_state)

    def _layer_by_layer(
        self,
        x: Float[Array, "B T D"],
        state: StackState,
        document_start: Bool[Array, "B N"],
        model_state: ModelState,
        feedback: StateKV | None = None,
        first: int = 0,
        axis: int = 1,
    ) -> StackOutput:
        # Reads a segment with some neighbouring runs. `first` is the index of the lowest of these
        # runs, and `state` has their states.
        after, learnt, losses, metrics = [], {}, {}, {}
        summaries = self._lowest_summaries(*document_start.shape)
        given = Given(document_start=document_start, feedback=feedback, summaries=summaries)
        for i, own in enumerate(state):
            given = given._replace(state=own)
            output = self._scan(first + i, "__call__", x, given, model_state, axis)
            x, aux, given = output.x, output.aux, given._replace(summaries=output.summaries)
            name = self.run_specs[first + i].name
            after.append(output.state)
            learnt |= {name: aux.model_state} if name in model_state else {}
            for loss, values in aux.losses.items():
                losses[loss] = losses.get(loss, 0.0) + jnp.sum(values)
            metrics |= {f"{name}/{metric}": jnp.mean(v) for metric, v in aux.metrics.items()}
        return StackOutput(x, tuple(after), LayerAux(learnt, losses, metrics))

    def _block_by_block(
        self,
        x: Float[Array, "B T D"],
        state: StackState,
        document_start: Bool[Array, "B N"],
        model_state: ModelState,
    ) -> StackOutput:
        # All layers attend to the states that the highest recurrent layer has after the previous
        # block. This layer and the layers below it therefore read one block after the other. After
        # that, the layers above it read the whole segment at once.
        serial = self.feedback_source + 1
        scan = nn.scan(
            Stack._read_block,
            variable_broadcast="params",
            split_rngs={"params": False, "dropout": True, SHARED: False},
            in_axes=(1, 1),
            out_axes=(1, 1, 0),
            unroll=unrolled(self.model.unroll, document_start.shape[1], BLOCKS_AT_ONCE),
            # Flax's check of constant variables traces the function twice. Only the initialisation
            # of parameters needs the check.
            check_constancy_invariants=self.is_initializing(),
        )
        # Every device scans over all blocks, so it needs the tokens of all blocks.
        x = constrain(x, "lanes", None, None)
        blocks = x.reshape(x.shape[0], document_start.shape[1], -1, x.shape[-1])
        carry = _swap_lanes_and_layers(state[:serial]), model_state
        (below, learnt), (y, feedback, aux) = scan(self, carry, blocks, document_start)
        y, above, aux_above = self._layer_by_layer(
            y.reshape(x.shape), state[serial:], document_start, learnt, feedback, first=serial
        )
        losses, metrics = (jax.tree.map(jnp.mean, values) for values in aux)
        for loss, value in aux_above.losses.items():
            losses[loss] = losses.get(loss, 0.0) + value
        learnt = {**learnt, **aux_above.model_state}
        state = (*_swap_lanes_and_layers(below), *above)
        return StackOutput(y, state, LayerAux(learnt, losses, metrics | aux_above.metrics))

    def _read_block(
        self,
        carry: tuple[StackState, ModelState],
        x: Float[Array, "B W D"],
        start: Bool[Array, " B"],
    ) -> tuple[tuple[StackState, ModelState], tuple[Float[Array, "B W D"], StateKV, tuple]]:
        state, model_state = carry
        source = self.feedback_source
        given = Given(state[source], document_start=start)
        opened = self._scan(source, "begin_block", None, given, model_state, axis=0)
        feedback = _feedback(opened.state)
        by_block = jax.tree.map(lambda part: part[:, None], feedback)
        x, state, aux = self._layer_by_layer(
            x, state, start[:, None], model_state, by_block, axis=0
        )
        return (state, {**model_state, **aux.model_state}), (x, feedback, (aux.losses, aux.metrics))

    def begin_block(self, state: StackState, model_state: ModelState) -> StackBlock:
        return tuple(
            self._scan(run, "begin_block", None, Given(own), model_state).state
            for run, own in enumerate(state)
        )

    def prepare_block(
        self, block: StackBlock, position: Int[Array, " B"], model_state: ModelState
    ) -> StackBlock:
        def prepared(run: int, opened: Any) -> Any:
            if not hasattr(self.run_specs[run].layer_kind.module, "prepare_block"):
                return opened
            given = Given(block=opened, position=position)
            return self._scan(run, "prepare_block", None, given, model_state).state

        return tuple(prepared(run, opened) for run, opened in enumerate(block))

    def decode_step(
        self,
        x: Float[Array, "B T D"],
        state: StackState,
        block: StackBlock,
        position: Int[Array, " B"],
        model_state: ModelState,
    ) -> tuple[Float[Array, "B T D"], StackBlock]:
        feedback = _feedback(block[self.feedback_source]) if self.model.feedback else None
        after = []
        for run, (own, opened) in enumerate(zip(state, block, strict=True)):
            given = Given(own, opened, position=position, feedback=feedback)
            x, opened, *_ = self._scan(run, "decode_step", x, given, model_state)
            after.append(opened)
        return x, tuple(after)

    def end_block(
        self, state: StackState, block: StackBlock, model_state: ModelState
    ) -> StackState:
        """Returns the states after `block`, which must be full."""
        lanes = len(jax.tree.leaves(state)[0])
        summaries, after = self._lowest_summaries(lanes, 1), []
        for run, (own, opened) in enumerate(zip(state, block, strict=True)):
            given = Given(own, opened, summaries=summaries)
            _, own, _, summaries = self._scan(run, "end_block", None, given, model_state)
            after.append(own)
        return tuple(after)


def _swap_lanes_and_layers(state: StackState) -> StackState:
    return jax.tree.map(lambda leaf: leaf.swapaxes(0, 1), state)


def _feedback(opened: Any) -> StateKV:
    # Returns the keys and values [B, S, H, K] of the recurrent states of a run's highest layer.
    last = partial(jax.lax.index_in_dim, index=-1, axis=0, keepdims=False)
    return jax.tree.map(last, opened.memory)
