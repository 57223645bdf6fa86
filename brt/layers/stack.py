"""A stack of layers: equal neighbours share one trace, as a scan over stacked parameters."""

from itertools import groupby

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.config import Model
from brt.layers.attention import WindowLayer
from brt.layers.recurrent import RecurrentLayer
from brt.layers.state import LayerState, OpenBlock, new_layer_state

_LAYERS = {"window": WindowLayer, "recurrent": RecurrentLayer}
# All of the form (carry, of each layer, of all layers) -> (carry, of each layer).
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


class Stack(nn.Module):
    """(x, state) -> (y, state) through all layers of `model.layer_types`."""

    model: Model
    training: bool = False

    def setup(self) -> None:
        self.runs = [self._run(*run) for run in runs(self.model)]

    def _run(self, name: str, kind: str, count: int) -> nn.Module:
        layer = _LAYERS[kind]
        if self.model.remat:
            layer = nn.remat(layer, methods=["__call__"], prevent_cse=False)
        scanned = nn.scan(
            layer,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=(1, nn.broadcast),
            out_axes=1,
            length=count,
            unroll=min(self.model.layer_unroll, count),
            metadata_params={nn.PARTITION_NAME: "layers"},
            methods=list(_METHODS),
        )
        return scanned(self.model, self.training, name=name)

    def __call__(
        self, x: Float[Array, "B T D"], state: StackState, document_start: Bool[Array, "B N"]
    ) -> tuple[Float[Array, "B T D"], StackState]:
        """A segment."""
        after = []
        for run, run_state in zip(self.runs, state, strict=True):
            x, run_state = run(x, run_state, document_start)
            after.append(run_state)
        return x, tuple(after)

    def open(self, state: StackState) -> StackBlock:
        """Empty blocks behind `state`, to be filled by `step`."""
        return tuple(run.open(None, s, None)[1] for run, s in zip(self.runs, state, strict=True))

    def step(
        self,
        x: Float[Array, "B 1 D"],
        state: StackState,
        block: StackBlock,
        position: Int[Array, ""],
    ) -> tuple[Float[Array, "B 1 D"], StackBlock]:
        """One token of the open blocks."""
        after = []
        for run, carried in zip(self.runs, zip(state, block, strict=True), strict=True):
            x, run_block = run.step(x, carried, position)
            after.append(run_block)
        return x, tuple(after)

    def close(self, state: StackState, block: StackBlock) -> StackState:
        """The state after full blocks."""
        pairs = zip(state, block, strict=True)
        return tuple(
            run.close(None, pair, None)[1] for run, pair in zip(self.runs, pairs, strict=True)
        )
