"""A stack of layers: equal neighbours share one trace, as a scan over stacked parameters."""

from itertools import groupby

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.config import Kernels, Model
from brt.layers.attention import WindowLayer
from brt.layers.clustered import ClusteredLayer
from brt.layers.memorizing import MemorizingLayer
from brt.layers.recurrent import RecurrentLayer
from brt.layers.state import LayerState, OpenBlock, new_layer_state
from brt.ops.recurrent_attention import StateMemory

_LAYERS = {
    "window": WindowLayer, "recurrent": RecurrentLayer, "memorizing": MemorizingLayer,
    "clustered": ClusteredLayer,
}  # fmt: skip
# All of the form (carry, of each layer, two of all layers) -> (carry, of each layer).
_METHODS = ("__call__", "open", "step", "close")

# One entry per run of equal layers. The batch is on axis 0, the layers of the run on axis 1.
StackState = tuple[LayerState, ...]
StackBlock = tuple[OpenBlock, ...]


def runs(model: Model) -> list[tuple[str, str, int]]:
    """Runs of equal neighbours: (name, kind, how many layers)."""
    result, first = [], 0
    for kind, group in groupby(model.layer_types):
        count = len(list(group))
        result.append((f"{kind}_{first}", kind, count))
        first += count
    return result


def new_stack_state(model: Model, batch: int, dtype: jnp.dtype) -> StackState:
    """The state of a stack that has read nothing."""

    def stacked(kind: str, count: int) -> LayerState:
        layer = new_layer_state(model, kind, batch, dtype)
        return jax.tree.map(lambda leaf: jnp.repeat(leaf[:, None], count, axis=1), layer)

    return tuple(stacked(kind, count) for _, kind, count in runs(model))


def _feedback(opened: OpenBlock) -> StateMemory:
    """[B, S, H, K]: what the last layer of a recurrent run shows to all other layers."""
    return jax.tree.map(lambda part: part[:, -1], opened.memory)


class Stack(nn.Module):
    """(x, state) -> (y, state) through all layers of `model.layer_types`."""

    model: Model
    training: bool = False
    kernels: Kernels = Kernels()

    def setup(self) -> None:
        self.runs = [self._run(*run) for run in runs(self.model)]
        kinds = [kind for _, kind, _ in runs(self.model)]
        if self.model.feedback:
            self.last_recurrent = max(i for i, kind in enumerate(kinds) if kind == "recurrent")

    def _run(self, name: str, kind: str, count: int) -> nn.Module:
        layer = _LAYERS[kind]
        if self.model.remat:
            layer = nn.remat(layer, methods=["__call__"], prevent_cse=False)
        scanned = nn.scan(
            layer,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=(1, nn.broadcast, nn.broadcast),
            out_axes=1,
            length=count,
            unroll=min(self.model.layer_unroll, count),
            metadata_params={nn.PARTITION_NAME: "layers"},
            methods=list(_METHODS),
        )
        return scanned(self.model, self.training, self.kernels, name=name)

    def __call__(
        self, x: Float[Array, "B T D"], state: StackState, document_start: Bool[Array, "B N"]
    ) -> tuple[Float[Array, "B T D"], StackState]:
        """A segment."""
        if self.model.feedback:
            return self._block_by_block(x, state, document_start)
        return self._layer_by_layer(x, state, document_start, None)

    def _layer_by_layer(
        self,
        x: Float[Array, "B T D"],
        state: StackState,
        document_start: Bool[Array, "B N"],
        feedback: StateMemory | None,
    ) -> tuple[Float[Array, "B T D"], StackState]:
        after = []
        for run, run_state in zip(self.runs, state, strict=True):
            x, run_state = run(x, run_state, document_start, feedback)
            after.append(run_state)
        return x, tuple(after)

    def _block_by_block(
        self, x: Float[Array, "B T D"], state: StackState, document_start: Bool[Array, "B N"]
    ) -> tuple[Float[Array, "B T D"], StackState]:
        """With feedback the lowest layer needs what the recurrent one made of the block before."""
        scan = nn.scan(
            Stack._read_block,
            variable_broadcast="params",
            split_rngs={"params": False, "dropout": True},
            in_axes=1,
            out_axes=1,
            unroll=min(self.model.block_unroll, document_start.shape[1]),
        )
        blocks = x.reshape(x.shape[0], -1, self.model.window, x.shape[-1])
        state, y = scan(self, state, blocks, document_start)
        return y.reshape(x.shape), state

    def _read_block(
        self, state: StackState, x: Float[Array, "B W D"], start: Bool[Array, " B"]
    ) -> tuple[StackState, Float[Array, "B W D"]]:
        recurrent = state[self.last_recurrent]
        recurrent = recurrent._replace(valid=recurrent.valid & ~start[:, None])
        _, opened = self.runs[self.last_recurrent].open(None, recurrent, None, None)
        feedback = jax.tree.map(lambda part: part[:, None], _feedback(opened))
        x, state = self._layer_by_layer(x, state, start[:, None], feedback)
        return state, x

    def open(self, state: StackState) -> StackBlock:
        """Empty blocks behind `state`, to be filled by `step`."""
        pairs = zip(self.runs, state, strict=True)
        return tuple(run.open(None, run_state, None, None)[1] for run, run_state in pairs)

    def step(
        self,
        x: Float[Array, "B 1 D"],
        state: StackState,
        block: StackBlock,
        position: Int[Array, ""],
    ) -> tuple[Float[Array, "B 1 D"], StackBlock]:
        """One token of the open blocks."""
        feedback = None
        if self.model.feedback:
            feedback = _feedback(block[self.last_recurrent])
        after = []
        for run, carried in zip(self.runs, zip(state, block, strict=True), strict=True):
            x, run_block = run.step(x, carried, position, feedback)
            after.append(run_block)
        return x, tuple(after)

    def close(self, state: StackState, block: StackBlock) -> StackState:
        """The state after full blocks."""
        pairs = zip(state, block, strict=True)
        return tuple(
            run.close(None, pair, None, None)[1] for run, pair in zip(self.runs, pairs, strict=True)
        )
