"""Compares summary layers with MELODI's code: outputs, memories and gradients."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict
from model_settings import PARITY, with_settings
from recordings import Golden, assert_close, assert_trees_close, nats_of_next_tokens

from brt.config import Model
from brt.config.model import MLP
from brt.layers.kinds import KINDS
from brt.layers.runs import runs
from brt.layers.state import Given
from brt.memories import Summaries
from brt.memories.summary import LongSummaryState, SummaryState
from brt.models import decoder
from brt.models.decoder import Decoder

_MIXES = {
    "summary_mix": "token_mixing_summary", "short_mix": "token_mixing_short",
    "long_mix": "long_mem_token_mixing",
}  # fmt: skip
_MIX = {
    "kernel": "lin_mix/kernel", "bias": "lin_mix/bias", "token_norm": "layernorm1/scale",
    "summary_norm": "layernorm2/scale",
}  # fmt: skip
NAMES = {
    "tokens/norm": "tbase/pre_attn_layernorm/scale",
    "tokens/queries": "tbase/_kvq/queries_layer/kernel",
    "tokens/keys": "tbase/_kvq/keys_layer/kernel",
    "tokens/values": "tbase/_kvq/values_layer/kernel",
    "tokens/scale": "tbase/_kvq/attention_scale",
    "tokens/relative_bias": "relative_positions/rel_embedding",
    "tokens/output": "tbase/post_attn_mlp/output_layer/kernel",
    "tokens/mlp_norm": "tbase/pre_ffn_layernorm/scale",
    "tokens/mlp_in": "tbase/ffn/mlp_layer/input_layer/kernel",
    "tokens/mlp_in_bias": "tbase/ffn/mlp_layer/input_layer/bias",
    "tokens/mlp_out": "tbase/ffn/mlp_layer/output_layer/kernel",
    "tokens/mlp_out_bias": "tbase/ffn/mlp_layer/output_layer/bias",
    "memory_gate": "attn_gate",
    **{f"{a}/{b}": f"{x}/{y}" for a, x in _MIXES.items() for b, y in _MIX.items()},
}
MEMORY = "_memory/previous_mems_train"


def model_of(golden: Golden) -> Model:
    """Returns the model that a recording describes."""
    cfg = golden.meta["cfg"]
    long = tuple(cfg.get("long_layers", [0] if cfg.get("kind") == "long" else []))
    layers = cfg["layers"] if "long_layers" in cfg else 1
    own = {"long_memory": cfg["long"], "long_increment": cfg["increment"]} if long else {}
    model = Model(
        layers=layers,
        model_dim=cfg["d"],
        heads=cfg["heads"],
        head_dim=cfg["head_dim"],
        mlp_dim=cfg["mlp"],
        window=cfg["window"],
        mlp=MLP(bias=True),
        vocab_size=cfg["vocab"],
        dtype="float32",
        kinds=(
            Summaries(
                long_layers=long,
                layers=tuple(i for i in range(layers) if i not in long),
                summaries=cfg["summary"],
                short_memory=cfg["short"],
                **own,
            ),
        ),
    )
    return with_settings(model, PARITY)


def layer_parameters(arrays: dict[str, np.ndarray], model: Model) -> dict[str, Any]:
    """Returns one layer's arrays with our names and shapes, and checks that none is left over."""
    arrays = {name.removeprefix("melodi_layer/"): array for name, array in arrays.items()}
    heads, flat = (model.heads, model.head_dim), {}
    for ours, theirs in NAMES.items():
        if theirs not in arrays:
            continue
        array = jnp.asarray(arrays.pop(theirs))
        if ours in ("tokens/queries", "tokens/keys", "tokens/values"):
            array = array.reshape(-1, *heads)
        elif ours == "tokens/output":
            array = array.reshape(1, *heads, -1)
        flat[ours] = array
    assert not arrays
    return unflatten_dict(flat, sep="/")


def layer_state(arrays: dict[str, np.ndarray]) -> SummaryState | LongSummaryState:
    """Returns the recorded memories as the state of rows whose memories are full."""
    short = jnp.asarray(arrays["short" + MEMORY])
    short = SummaryState(short, jnp.ones(len(short), bool))
    if "long" + MEMORY not in arrays:
        return short
    long = jnp.asarray(arrays["long" + MEMORY])
    return LongSummaryState(short, long, jnp.full(len(long), long.shape[1]))


def check_state(state: Any, arrays: dict[str, np.ndarray], name: str) -> None:
    assert_close(state.short.vectors, arrays["short" + MEMORY], f"{name}, short")
    if isinstance(state, LongSummaryState):
        assert_close(state.vectors, arrays["long" + MEMORY], f"{name}, long")


def starts(flags: np.ndarray, tokens: int, model: Model) -> jax.Array:
    """Returns a boolean array [lanes, blocks] with these flags in the first block of each lane."""
    return jnp.zeros((len(flags), tokens // model.window), bool).at[:, 0].set(flags)


@pytest.mark.slow_cases("melodi_short_layer_unequal", "melodi_long_layer")
def test_summary_layers_equal_the_recordings(melodi_layer_file: Path) -> None:
    golden = Golden(melodi_layer_file)
    model = model_of(golden)
    module = KINDS[model.layer_types[0]].module(model)
    params = layer_parameters(golden.under("params"), model)

    def stream(segment: str) -> tuple[jax.Array, jax.Array]:
        us = jnp.asarray(golden["us" + segment])
        us = us.reshape(len(us), -1, model.of(Summaries).summaries, model.model_dim)
        return jnp.asarray(golden["xs" + segment]), us

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def value_and_grad(params: Any, stream: tuple, state: Any, start: jax.Array) -> tuple:
        x, summaries = stream
        given = Given(state, document_start=start, summaries=summaries)
        after = module.apply({"params": params}, x, given)
        state, memories = after.state, golden.under("cs")
        us = after.summaries.reshape(golden["us"].shape)
        value = jnp.sum(after.x * golden["ct"]) + jnp.sum(us * golden["cu"])
        value += jnp.sum(state.short.vectors * memories["short" + MEMORY])
        if isinstance(state, LongSummaryState):
            value += jnp.sum(state.vectors * memories["long" + MEMORY])
        return value, (after.x, us, state)

    tokens = golden["xs"].shape[1]
    (value, (ys, us, state)), (grads, grad_stream) = value_and_grad(
        params, stream(""), layer_state(golden.under("state_in")),
        starts(golden["start"], tokens, model),
    )  # fmt: skip
    assert_close(ys, golden["ys"], "ys")
    assert_close(us, golden["ys_us"], "summaries")
    check_state(state, golden.under("state_out"), "state")
    scale = float(np.abs(golden["ys"] * golden["ct"]).sum())
    assert_close(value, golden["loss"], "loss", scale)
    assert_close(grad_stream[0], golden["grad_xs"], "gradient of xs")
    grad_us = grad_stream[1].reshape(golden["us"].shape)
    assert_close(grad_us, golden["grad_us"], "gradient of summaries")
    assert_trees_close(grads, layer_parameters(golden.under("grad_params"), model), "gradient")

    (_, (ys, us, state)), _ = value_and_grad(
        params, stream("2"), state, starts(golden["start2"], tokens, model)
    )
    assert_close(ys, golden["ys2"], "ys of segment 2")
    assert_close(us, golden["ys_us2"], "summaries of segment 2")
    check_state(state, golden.under("state_out2"), "state of segment 2")


@pytest.mark.slow  # test_summary_layers_equal_the_recordings compares the layers one by one.
def test_stacks_of_summary_layers_equal_the_recordings(melodi_stack_file: Path) -> None:
    golden = Golden(melodi_stack_file)
    model = model_of(golden)
    groups, first = [], 0  # the runs, each with the indices of its layers
    for run in runs(model):
        groups.append((run.name, range(first, first + run.layers)))
        first += run.layers

    def parameters(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
        def of_layer(i: int) -> dict[str, Any]:
            prefix = f"layer_stack/melodi_layers_{i}/"
            own = {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}
            return layer_parameters(own, model)

        stack: dict[str, Any] = {
            name: jax.tree.map(lambda *x: jnp.stack(x), *map(of_layer, layers))
            for name, layers in groups
        }
        stack["summaries"] = jnp.asarray(arrays["layer_stack/summary_embeddings"])
        return {
            "embedding": jnp.asarray(arrays["embed/embedding"]),
            "norm": jnp.asarray(arrays["layer_stack/final_layernorm/scale"]),
            "stack": stack,
        }

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def value_and_grad(params: Any, state: Any, tokens: jax.Array, start: jax.Array) -> tuple:
        hidden, state, *_ = Decoder(model).apply({"params": params}, tokens, state, start)
        logits = decoder.logits(model, params["embedding"], hidden)
        return nats_of_next_tokens(logits, tokens), (logits, state)

    params = parameters(golden.under("params"))
    state = decoder.new_state(model, len(golden["start1"]))
    for segment, gradients in (("1", "grad_params"), ("2", "grad_params2")):
        tokens = golden["tokens" + segment]
        start = starts(golden["start" + segment], tokens.shape[1], model)
        (value, (logits, state)), grads = value_and_grad(params, state, tokens, start)
        assert_close(logits, golden["logits" + segment], "logits")
        assert_close(value, golden["loss" + segment], "loss")
        for (_, layers), run_state in zip(groups, state, strict=True):
            for place, i in enumerate(layers):
                own = jax.tree.map(lambda leaf, place=place: leaf[:, place], run_state)
                folder = f"state{segment}/layer_stack/melodi_layers_{i}"
                check_state(own, golden.under(folder), folder)
        assert_trees_close(grads, parameters(golden.under(gradients)), f"gradient {segment}")
