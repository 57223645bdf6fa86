"""The block-recurrent layer: tokens attend to S state vectors, and the states attend to the tokens
of each block. The letters of shapes are those of `brt.layers.state`.
"""

from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from brt.config import Model
from brt.distributed.rules import constrain
from brt.layers.attention import TransformerBlock
from brt.layers.basic import (
    BLOCKS_AT_ONCE,
    FROM_HEADS,
    INTO_HEADS,
    ONES,
    WHOLE_HEADS,
    gate_bias,
    gate_bias_until,
    kernel_init,
    parameter,
    unrolled,
)
from brt.layers.cache import closed_window, with_cache
from brt.layers.sections import Recurrence
from brt.layers.state import (
    Given,
    LayerOutput,
    WindowState,
    cache_is_readable,
    has_null_keys,
    open_block,
    state_array,
    window_state,
    zero_where_invalid,
)
from brt.layers.window import WindowLayer, state_attention_flops, window_flops
from brt.ops.gates import GateWeights
from brt.ops.recurrent_attention import (
    CellWeights,
    StateKV,
    state_kv,
    state_scan,
    state_update,
    tokens_by_head,
)

# On CPUs, every iteration of the scan over blocks copies the states. If the states of a row of the
# batch have at least this many numbers, one iteration processes BLOCKS_AT_ONCE blocks: this saves
# more time in training than it adds to compilation. Otherwise, it processes one block.
_LARGE_STATES = 1 << 15


class RecurrentState(NamedTuple):
    """The cache and the recurrent states, which stay float32."""

    window: WindowState
    vectors: Float[Array, "B S D"]
    valid: Bool[Array, " B"]  # False where the learned initial states replace `vectors`.


def recurrent_state(model: Model) -> RecurrentState:
    shape = (model.of(Recurrence).states, model.model_dim)
    vectors = state_array(shape, (None, None), "float32")
    return RecurrentState(window_state(model), vectors, state_array((), (), "bool"))


def recurrent_flops(model: Model) -> int:
    """Returns the FLOPs per token of a sliding-window layer, of reading the states, and of the
    state update: its projections, its attention to states and to tokens, its MLP and its gates.
    """
    section = model.of(Recurrence)
    m, width = model, model.heads * model.head_dim
    flops = 4 * 2 * m.model_dim * width + 4 * width * (section.states + 2 * m.window)
    gates = {"fixed": 0, "gru": 1, "lstm": 2}[section.gate]
    into_mlp = m.model_dim
    if section.gate_layout == "single":
        into_mlp = 2 * width
    else:
        flops += (1 + gates) * 2 * 2 * width * m.model_dim
    if section.gate_layout != "skip":
        flops += 2 * into_mlp * m.mlp_dim + (1 + gates) * 2 * m.mlp_dim * m.model_dim
    # With feedback, `window_flops` already includes reading states.
    tokens = window_flops(m) + (0 if m.feedback else state_attention_flops(m))
    return tokens + flops * section.states // m.window


def _first_keeps(model: Model) -> nn.initializers.Initializer:
    section = model.of(Recurrence)
    if section.gate_horizon:
        return gate_bias_until(section.gate_horizon, 0.0 if section.gate == "fixed" else 1.0)
    return gate_bias(section.gate_bias)


class StateCell(nn.Module):
    """The parameters of the recurrent cell: the states at the start of a document (`initial`), and
    the `CellWeights` of the state update.
    """

    model: Model

    def setup(self) -> None:
        m = self.model
        self.section = m.of(Recurrence)
        self.initial = self._by_state("initial", 0.1)
        self.weights = self._weights(m)

    def _by_state(self, name: str, deviation: float) -> Float[Array, "S D"]:
        shape, init = (self.section.states, self.model.model_dim), nn.initializers.normal(deviation)
        return parameter(self, name, shape, ("states", "embed"), init)

    def _weights(self, m: Model) -> CellWeights:
        layout, by_head = self.section.gate_layout, (m.model_dim, m.heads, m.head_dim)
        attended = (2, m.heads, m.head_dim)
        weights = CellWeights(
            norm=parameter(self, "norm", (m.model_dim,), ("embed",), ONES),
            ids=self._by_state("ids", self.section.id_init),
            keys=parameter(self, "keys", by_head, INTO_HEADS),
            values=parameter(self, "values", by_head, INTO_HEADS),
            queries=parameter(self, "queries", by_head, INTO_HEADS),
            cross_queries=parameter(self, "cross_queries", by_head, INTO_HEADS),
            scale=self._scale("scale"),
            cross_scale=self._scale("cross_scale"),
        )
        if layout == "single":
            # Mesh.tensor shards the axis "mlp" of `mlp_in`, so it cannot also shard the axis of
            # heads of this kernel.
            return self._mlp(weights, attended, WHOLE_HEADS)
        weights = weights._replace(
            output=parameter(
                self, "output", (*attended, m.model_dim), FROM_HEADS, kernel_init(inputs=3)
            ),
            output_gate=self._gate("output_gate", attended, FROM_HEADS[:-1]),
        )
        if layout == "skip":
            return weights
        norm = parameter(self, "mlp_norm", (m.model_dim,), ("embed",), ONES)
        return self._mlp(weights._replace(mlp_norm=norm), (m.model_dim,), ("embed",))

    def _scale(self, name: str) -> Float[Array, " H"]:
        m = self.model
        if not m.attention.normalize_qk:
            return jnp.full((m.heads,), m.head_dim**-0.5)
        init = nn.initializers.constant(m.attention.scale_init)
        return jnp.abs(parameter(self, name, (m.heads,), ("heads",), init))

    def _mlp(
        self, weights: CellWeights, inputs: tuple[int, ...], axes: tuple[str, ...]
    ) -> CellWeights:
        m = self.model
        return weights._replace(
            mlp_in=parameter(
                self, "mlp_in", (*inputs, m.mlp_dim), (*axes, "mlp"), kernel_init(len(inputs))
            ),
            mlp_out=parameter(self, "mlp_out", (m.mlp_dim, m.model_dim), ("mlp", "embed")),
            mlp_gate=self._gate("mlp_gate", (m.mlp_dim,), ("mlp",)),
        )

    def _gate(self, name: str, inputs: tuple[int, ...], axes: tuple[str, ...]) -> GateWeights:
        kind, width = self.section.gate, self.model.model_dim

        def bias(part: str, keeps: bool = True) -> Float[Array, " D"]:
            # `part` is a part of the parameter's name. `keeps` is True if the gate decides how much
            # of a state is kept; only then do the settings of the initial bias apply.
            init = _first_keeps(self.model) if keeps else gate_bias(0.0)
            return parameter(self, f"{name}_{part}bias", (width,), ("embed",), init)

        def kernel(part: str) -> Float[Array, "*M D"]:
            init = kernel_init(len(inputs), variance=0.1)
            shape, names = (*inputs, width), (*axes, "embed")
            return parameter(self, f"{name}_{part}kernel", shape, names, init)

        if kind == "fixed":
            return GateWeights(bias(""))
        if kind == "gru":
            return GateWeights(bias(""), kernel(""))
        return GateWeights(
            bias("forget_"), kernel("forget_"), bias("input_", False), kernel("input_")
        )


class RecurrentLayer(WindowLayer):
    """A block-recurrent layer (Block-Recurrent Transformers, section 3).

    Tokens attend to their window and to the states (S state vectors) as they were before the
    tokens' block. The states are updated once per block: they attend to each other, to the tokens
    of the block, and to the tokens of the block before it.
    """

    def setup(self) -> None:
        self.tokens = TransformerBlock(self.model, True, self.training, self.kernels)
        self.cell = StateCell(self.model)

    def _options(self) -> dict[str, object]:
        section, m = self.model.of(Recurrence), self.model
        return {
            "kind": section.gate,
            "normalize_qk": m.attention.normalize_qk,
            "null_keys": has_null_keys(m),
            "attention": self.kernels.softmax_attention,
        }

    def _vectors(
        self, state: RecurrentState, document_start: Bool[Array, " B"] | None = None
    ) -> Float[Array, "B S D"]:
        valid = state.valid if document_start is None else state.valid & ~document_start
        return jnp.where(valid[:, None, None], state.vectors, self.cell.initial[None])

    def __call__(self, x: Float[Array, "B T D"], given: Given) -> LayerOutput:
        """Computes the states of all blocks first; then the tokens of all blocks attend at once."""
        section, m = self.model.of(Recurrence), self.model
        projections = self.tokens.project(x)
        past, window = with_cache(m, given, projections)
        # Every device scans over all blocks, so it needs the keys and values of all blocks.
        replicated = ("lanes", None, "heads", None)
        own = self.tokens.by_query_head(projections.keys, projections.values)
        keys, values = (constrain(z, *replicated) for z in own)
        on_cpus = BLOCKS_AT_ONCE if section.states * m.model_dim >= _LARGE_STATES else 1
        vectors, memory = state_scan(
            self.cell.weights, self.cell.initial, self._vectors(given.state),
            self.tokens.by_query_head(past.keys, past.values), keys, values, past.cache_mask,
            given.document_start, implementation=self.kernels.recurrent_attention,
            unroll=unrolled(m.unroll, given.document_start.shape[1], BLOCKS_AT_ONCE, on_cpus),
            **self._options(),
        )  # fmt: skip
        names = ("lanes", "blocks", None, "heads", None)
        memory = StateKV(*(constrain(part, *names) for part in memory))
        y = self.tokens.attend(projections, past, memory)
        return LayerOutput(y, RecurrentState(window, vectors, jnp.ones_like(given.state.valid)))

    def begin_block(self, x: None, given: Given) -> LayerOutput:
        vectors = self._vectors(given.state, given.document_start)
        memory = state_kv(
            self.cell.weights, vectors, normalize_qk=self.model.attention.normalize_qk,
            dtype=given.state.window.keys.dtype,
        )  # fmt: skip
        return LayerOutput(x, open_block(given, memory))

    def decode_step(self, x: Float[Array, "B T D"], given: Given) -> LayerOutput:
        return super().decode_step(x, given._replace(feedback=given.block.memory))

    def end_block(self, x: None, given: Given) -> LayerOutput:
        """Updates the states by attention to the cache and to the open block, and makes the open
        block the cache.
        """
        window = given.state.window
        if not self.model.sliding.mask_empty_cache:
            window = zero_where_invalid(window)
        before, own = (
            tokens_by_head(*self.tokens.by_query_head(part.keys, part.values, normalize=True))
            for part in (window, given.block)
        )
        cache_mask = cache_is_readable(self.model, window)
        vectors = state_update(
            self.cell.weights,
            self._vectors(given.state),
            before,
            own,
            cache_mask,
            **self._options(),
        )[0]
        after = closed_window(self.model, given)
        return LayerOutput(x, RecurrentState(after, vectors, jnp.ones_like(given.state.valid)))
