"""Kinds of layers that tests register, and small models with every kind and combination of
settings.

`Toy` changes its state with every block, has an auxiliary loss and learns a number without
gradients. `Decay` (tests/data/user_files/token_recurrence.py) is a recurrence over tokens.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import user_kinds
from model_settings import PARITY, with_settings
from user_kinds import my_layers

from brt.config import Model
from brt.config.fields import adaptable
from brt.config.kinds import KindSection
from brt.layers import kinds
from brt.layers.state import Given, LayerAux, LayerOutput


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToySection(KindSection):
    kind: ClassVar[str] = "toy"

    layers: tuple[int, ...] = adaptable(())


ToySection.__name__ = "Toy"  # This is the section's name in .gin files.


class Toy(my_layers.EchoLayer):
    """An `EchoLayer` with an auxiliary loss, whose echo grows with the number of tokens that the
    layer was trained on.
    """

    def _louder(self, output: LayerOutput, x: jax.Array, given: Given) -> jax.Array:
        return x + (1 + 0.01 * given.model_state).astype(x.dtype) * (output.x - x)

    def __call__(self, x: jax.Array, given: Given) -> LayerOutput:
        output = super().__call__(x, given)
        y, seen = self._louder(output, x, given), given.model_state + x.shape[1]
        aux = LayerAux(seen, {"loud": jnp.mean(y**2)}, {"size": jnp.mean(jnp.abs(x))})
        return output._replace(x=y, aux=aux)

    def decode_step(self, x: jax.Array, given: Given) -> LayerOutput:
        output = super().decode_step(x, given)
        return output._replace(x=self._louder(output, x, given))


TOY = my_layers.ECHO._replace(
    module=Toy,
    flops=lambda model: 3 * model.model_dim,
    section=ToySection,
    new_model_state=lambda model: jnp.zeros(()),
)


@contextlib.contextmanager
def registered() -> Iterator[None]:
    """Registers `Toy` and `Decay` until the end of the context."""
    with user_kinds.registered():
        kinds.register_kind("toy", TOY)
        yield


PLAIN = Model(
    layers=2, model_dim=16, heads=2, head_dim=8, mlp_dim=16, vocab_size=32, window=4,
    relative_buckets=4, relative_max_distance=16, dtype="float32",
)  # fmt: skip
_RECURRENT = {"Recurrence.states": 4}
_GROUPED = {
    "heads": 4, "SelfAttention.kv_heads": 2, "head_dim": 4, "positions": "rotary",
}  # fmt: skip
_SETTINGS: dict[str, dict[str, Any]] = {
    "window": {},
    "alibi": {"positions": "alibi"},
    "rotary": {"positions": "rotary"},
    "no positions": {"positions": "none"},
    "no cache": {"Window.cache": False},
    "a window of three blocks": {"window": 12, "Window.block": 4},
    "a window within a block": {"window": 3, "Window.block": 8},
    "a window of two blocks and a half": {"window": 10, "Window.block": 4, "positions": "rotary"},
    "a window without the token": {
        "window": 6, "Window.block": 4, "Window.attend_to_self": False,
        "SelfAttention.normalize_qk": False,
        "positions": "alibi",
    },
    "windows by layer": {
        **_RECURRENT, "Recurrence.layers": (0,), "window": 8, "Window.by_layer": (0, 20),
        "positions": "rotary",
    },
    # These are settings of pretrained decoders. Heads have 4 channels, so that a model has four
    # heads.
    "grouped queries": {
        **_GROUPED, "MLP.gated": True, "activation": "silu", "Rotary.divisors": (2.0,),
    },
    "grouped queries, sinks": {
        **_GROUPED, "Window.sinks": 3, "window": 6, "Window.block": 4,
        "SelfAttention.normalize_qk": False,
        "SelfAttention.bias": "all", "Embedding.tied": False, "Embedding.logit_scale": "one",
    },
    "sinks, windows by layer": {
        "window": 8, "Window.block": 4, "Window.by_layer": (3, 0), "Window.sinks": 2,
        "positions": "rotary",
        "Rotary.local_base": 100.0, "Embedding.factor": 4.0, "Rotary.skipped": (False, True),
    },
    "recurrent, grouped queries, sinks": {
        **_RECURRENT, "Recurrence.layers": (1,), "heads": 4, "SelfAttention.kv_heads": 1,
        "head_dim": 4,
        "Window.sinks": 2, "SelfAttention.normalize_qk": False, "Norm.queries_keys": "head",
        "Norm.place": "both",
        "Norm.offset": True,
    },
    "norms of outputs and of all heads": {
        **_GROUPED, "Window.sinks": 2, "window": 6, "Window.block": 4, "positions": "rotary",
        "SelfAttention.normalize_qk": False, "Norm.queries_keys": "heads", "Norm.place": "after",
        "residual_factor": 0.5, "Embedding.logit_divisor": 2.0, "Rotary.attention_factor": 1.2,
    },
    "layer norms, parallel": {
        "Norm.kind": "layer", "parallel": True, "positions": "rotary", "Rotary.channels": 2,
        "SelfAttention.normalize_qk": False, "SelfAttention.bias": "all", "MLP.bias": True,
    },
    "capped logits": {
        **_GROUPED, "SelfAttention.soft_cap": 2.0, "SelfAttention.normalize_qk": False,
        "Embedding.soft_cap": 3.0, "Window.by_layer": (3, 0), "Window.sinks": 2,
    },
    "experts, a learned sink": {
        **_GROUPED, "MLP.gated": True, "MLP.bias": True, "MLP.experts": 3,
        "MLP.experts_per_token": 2, "MLP.clamp": 0.5, "SelfAttention.learned_sink": True,
        "SelfAttention.normalize_qk": False, "Window.sinks": 2, "window": 6, "Window.block": 4,
    },
    "learned positions": {
        "positions": "learned", "Rotary.context": 40, "Window.cache": False,
        "Norm.kind": "layer",
    },
    "recurrent": {**_RECURRENT, "Recurrence.layers": (0,)},
    "recurrent, above": {**_RECURRENT, "Recurrence.layers": (1, 2), "layers": 3},
    "recurrent, around": {**_RECURRENT, "Recurrence.layers": (0, 2), "layers": 3},
    "recurrent, no cache": {
        **_RECURRENT, "Recurrence.layers": (1,), "Window.cache": False, "positions": "rotary",
    },
    "recurrent, no cache, no positions": {
        **_RECURRENT, "Recurrence.layers": (0,), "layers": 1, "Window.cache": False,
        "positions": "none",
    },
    # Every gate and every gate layout occurs, with all the options that change the arithmetic.
    "recurrent, fixed gate, skip": {
        **_RECURRENT, "Recurrence.layers": (0,), "positions": "none", "Window.cache": False,
    },
    "recurrent, LSTM gate, dual": {
        **_RECURRENT, "Recurrence.layers": (0,), "Recurrence.gate": "lstm",
        "Recurrence.gate_layout": "dual", "positions": "alibi", "parity": True,
    },
    "recurrent, GRU gate, single": {
        **_RECURRENT, "Recurrence.layers": (0,), "Recurrence.gate": "gru",
        "Recurrence.gate_layout": "single",
        "SelfAttention.normalize_qk": False, "Window.attend_to_self": False,
    },
    "recurrent, fixed gate, dual": {
        **_RECURRENT, "Recurrence.layers": (0,), "Recurrence.gate_layout": "dual",
        "positions": "rotary", "Window.cache": False, "Window.attend_to_self": False,
    },
    "recurrent, LSTM gate, skip": {
        **_RECURRENT, "Recurrence.layers": (0,), "Recurrence.gate": "lstm",
        "positions": "rotary", "parity": True,
    },
    "feedback": {**_RECURRENT, "Recurrence.layers": (1,), "layers": 3, "feedback": True},
    "feedback, rotary": {
        **_RECURRENT, "Recurrence.layers": (1,), "feedback": True, "positions": "rotary",
    },
    "feedback of the last": {
        **_RECURRENT, "Recurrence.layers": (0, 2), "layers": 3, "feedback": True,
        "Recurrence.gate": "lstm", "Recurrence.gate_layout": "single",
    },
    "memorizing": {"Memorizing.layers": (1,), "Memorizing.size": 10, "Memorizing.neighbors": 3},
    "memorizing, feedback": {
        **_RECURRENT, "Memorizing.layers": (0,), "Memorizing.size": 12, "Memorizing.neighbors": 3,
        "Memorizing.search": "bucketed", "Recurrence.layers": (1,), "feedback": True,
    },
    "memorizing, grouped queries, sinks": {
        **_GROUPED, "Memorizing.layers": (1,), "Memorizing.size": 10, "Memorizing.neighbors": 3,
        "Memorizing.gate": "tanh", "Window.sinks": 2, "window": 6, "Window.block": 4,
        "SelfAttention.normalize_qk": False,
        "SelfAttention.bias": "qkv",
    },
    "clustered": {
        "Clustered.layers": (1,), "Clustered.clusters": 3, "Clustered.top_k": 2,
        "positions": "alibi",
    },
    "clustered, feedback": {
        **_RECURRENT, "Clustered.layers": (0,), "Clustered.clusters": 3, "Clustered.top_k": 2,
        "positions": "alibi", "Recurrence.layers": (1,), "feedback": True,
    },
    "compressive": {
        "Compressive.layers": (0, 2), "layers": 3, "Compressive.slots": 4, "Compressive.rate": 2,
    },
    "compressive, feedback": {
        **_RECURRENT, "Compressive.layers": (0,), "Compressive.slots": 3, "Compressive.rate": 4,
        "positions": "alibi", "Recurrence.layers": (1,),
        "feedback": True,
    },
    "summary": {
        "Summaries.layers": (0,), "Summaries.long_layers": (1,), "Summaries.summaries": 2,
        "Summaries.short_memory": 3, "Summaries.long_memory": 4, "Summaries.long_increment": 2,
    },
    "dense memory": {"DenseMemory.layers": (1,), "DenseMemory.size": 10},
    "dense memory, grouped queries": {
        "heads": 4, "SelfAttention.kv_heads": 2, "head_dim": 4, "DenseMemory.layers": (1,),
        "DenseMemory.size": 10,
    },
    "gated dense memory, feedback": {
        **_RECURRENT, "DenseMemory.layers": (0,), "DenseMemory.size": 10,
        "DenseMemory.gate": "tanh", "Recurrence.layers": (1,), "feedback": True,
    },
    "gated dense memory, grouped queries, sinks": {
        **_GROUPED, "DenseMemory.layers": (1,), "DenseMemory.size": 11, "DenseMemory.gate": "tanh",
        "Window.sinks": 2, "window": 6, "Window.block": 4, "SelfAttention.normalize_qk": False,
        "Norm.queries_keys": "head",
    },
    "routing": {
        "Routing.layers": (0, 2), "layers": 3, "Routing.heads": 1, "Routing.clusters": 3,
        "Routing.keep": 5,
    },
    "gated linear recurrence": {"RGLRU.layers": (0, 2), "layers": 3},
    "gated linear recurrence, blocks of a token": {
        "RGLRU.layers": (1,), "window": 7, "Window.block": 1,
    },
    "gated linear recurrence, grouped queries": {
        **_GROUPED, "RGLRU.layers": (1,), "Window.sinks": 2,
    },
    "gated delta rule": {
        "GatedDeltaNet.layers": (0, 2), "layers": 3, "GatedDeltaNet.heads": 3,
        "GatedDeltaNet.key_dim": 4, "GatedDeltaNet.value_dim": 6,
    },
    "gated delta rule, blocks of a token": {
        "GatedDeltaNet.layers": (1,), "window": 7, "Window.block": 1,
    },
    "gated delta rule beside a window": {"GatedDeltaNet.window_layers": (1,)},
    "gated delta rule beside grouped queries, sinks": {
        **_GROUPED, "GatedDeltaNet.window_layers": (0,), "Window.sinks": 3, "window": 6,
        "Window.block": 4,
        "SelfAttention.normalize_qk": False, "SelfAttention.bias": "all", "Norm.place": "both",
        "Norm.offset": True,
    },
    "gated delta rule, feedback": {
        **_RECURRENT, "Recurrence.layers": (1,), "feedback": True,
        "GatedDeltaNet.window_layers": (0,),
    },
    "toy": {"Toy.layers": (0, 1), "layers": 3},
    "a user's state of blocks": {"Echo.layers": (0,)},
    "a recurrence over tokens": {"Decay.layers": (0, 2), "layers": 3, "window": 8},
    "a recurrence over tokens, blocks of a token": {
        "Decay.layers": (1,), "window": 7, "Window.block": 1,
    },
}  # fmt: skip


def _model(parity: bool = False, **settings: Any) -> Model:
    """Returns `PLAIN` with changed settings, and with the arithmetic of the authors' code if
    `parity`.
    """
    return with_settings(PLAIN, {**(PARITY if parity else {}), **settings})


def _models() -> dict[str, Model]:
    with registered():
        return {name: _model(**settings) for name, settings in _SETTINGS.items()}


MODELS = _models()
