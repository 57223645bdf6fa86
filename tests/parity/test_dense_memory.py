"""Compares the dense-memory layer with MELODI's code: outputs, memory and gradients.

MELODI's memory is a ring buffer with one write index for all rows; ours has the oldest token first.
Without positions, the order of keys has no effect. MELODI's stack adds the output of the layer,
which already contains the residual, to the layer's input. The block of the layer is a segment, also
if windows of other layers are shorter.
"""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_settings import PARITY, with_settings
from recordings import Golden, assert_close, assert_trees_close, nats_of_next_tokens
from test_melodi import layer_parameters, starts

from brt.config import Model
from brt.config.model import MLP
from brt.layers.kinds import KINDS
from brt.layers.state import Given
from brt.layers.window import WindowLayer
from brt.memories import DenseMemory
from brt.memories.dense_memory import DenseMemoryLayer, DenseState
from brt.models import decoder
from brt.ops.normalization import rms_norm

RING = "recurrent_memory/{}_train"


def model_of(golden: Golden) -> Model:
    """Returns a model whose block is the segment."""
    cfg = golden.meta["cfg"]
    model = Model(
        layers=1, model_dim=cfg["d"], heads=cfg["heads"], head_dim=cfg["head_dim"],
        mlp_dim=cfg["mlp"], window=cfg["seq"], mlp=MLP(bias=True), vocab_size=cfg["vocab"],
        dtype="float32", kinds=(DenseMemory(layers=(0,), size=cfg["memory"]),),
    )  # fmt: skip
    return with_settings(model, PARITY)


def memory(arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the keys and values of a recorded memory, the oldest first."""
    place = int(arrays[RING.format("write_index")])
    names = (RING.format(name) for name in ("memory_keys", "memory_values"))
    keys, values = (np.roll(arrays[name], -place, axis=1) for name in names)
    return keys, values


def check_memory(state: DenseState, arrays: dict[str, np.ndarray], name: str) -> None:
    for ours, theirs in zip(state[:2], memory(arrays), strict=True):
        assert_close(ours, theirs, name)


@pytest.mark.slow_cases("densekv_layer_segment")
def test_a_dense_memory_layer_equals_the_recordings(dense_layer_file: Path) -> None:
    golden = Golden(dense_layer_file)
    model = model_of(golden)
    params = layer_parameters(golden.under("params"), model)

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def value_and_grad(params: Any, xs: jax.Array, state: DenseState, start: jax.Array) -> tuple:
        ys, state, *_ = DenseMemoryLayer(model).apply(
            {"params": params}, xs, Given(state, document_start=start)
        )
        return jnp.sum(ys * golden["ct"]), (ys, state)

    keys, values = map(jnp.asarray, memory(golden.under("state_in")))
    state = DenseState(keys, values, jnp.full(len(keys), model.of(DenseMemory).size))
    tokens = golden["xs"].shape[1]
    (value, (ys, state)), (grads, grad_xs) = value_and_grad(
        params, jnp.asarray(golden["xs"]), state, starts(golden["start"], tokens, model)
    )
    assert_close(ys, golden["ys"], "ys")
    check_memory(state, golden.under("state_out"), "memory")
    scale = float(np.abs(golden["ys"] * golden["ct"]).sum())
    assert_close(value, golden["loss"], "loss", scale)
    assert_close(grad_xs, golden["grad_xs"], "gradient of xs")
    assert_trees_close(grads, layer_parameters(golden.under("grad_params"), model), "gradient")
    (_, (ys, state)), _ = value_and_grad(
        params, jnp.asarray(golden["xs2"]), state, starts(golden["start2"], tokens, model)
    )
    assert_close(ys, golden["ys2"], "ys of segment 2")
    check_memory(state, golden.under("state_out2"), "memory after segment 2")


@pytest.mark.slow  # test_a_dense_memory_layer_equals_the_recordings compares the layers one by one.
def test_a_stack_with_dense_memory_equals_the_recordings(dense_stack_file: Path) -> None:
    golden = Golden(dense_stack_file)
    dense = model_of(golden)
    cfg = golden.meta["cfg"]
    xl = with_settings(
        dense, {"DenseMemory.layers": (), "Memorizing.neighbors": 1, "window": cfg["window"]}
    )
    (beside,) = cfg["side_layers"]
    names = [f"transformer{i}" for i in range(cfg["layers"])]
    layers = dict.fromkeys(names[: beside + 1], xl) | {"side_layer": dense}
    layers |= dict.fromkeys(names[beside + 1 :], xl)

    def parameters(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
        found: dict[str, Any] = {
            "embedding": jnp.asarray(arrays["embed/embedding"]),
            "norm": jnp.asarray(arrays["layer_stack/final_layernorm/scale"]),
        }
        for name, model in layers.items():
            prefix = f"layer_stack/{name}/"
            own = {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}
            found[name] = layer_parameters(own, model)
        return found

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def value_and_grad(params: Any, states: tuple, tokens: jax.Array, flags: jax.Array) -> tuple:
        x, after = params["embedding"][tokens], []
        for (name, model), state in zip(layers.items(), states, strict=True):
            layer = DenseMemoryLayer if model is dense else WindowLayer
            start = starts(flags, tokens.shape[1], model)
            y, own, *_ = layer(model).apply(
                {"params": params[name]}, x, Given(state, document_start=start)
            )
            x = x + y if model is dense else y
            after.append(own)
        logits = decoder.logits(xl, params["embedding"], rms_norm(x, params["norm"]))
        return nats_of_next_tokens(logits, tokens), (logits, tuple(after))

    params, kind = parameters(golden.under("params")), jnp.dtype("float32")
    batch = len(golden["start1"])
    fresh = KINDS["window"].new_state(xl, batch, kind)
    states: tuple = tuple(
        KINDS["dense_memory"].new_state(dense, batch, kind) if model is dense else fresh
        for model in layers.values()
    )
    for segment, gradients in (("1", "grad_params"), ("2", "grad_params2")):
        tokens, flags = (jnp.asarray(golden[name + segment]) for name in ("tokens", "start"))
        (value, (logits, states)), grads = value_and_grad(params, states, tokens, flags)
        assert_close(logits, golden["logits" + segment], "logits")
        assert_close(value, golden["loss" + segment], "loss")
        folder = f"state{segment}/layer_stack/side_layer"
        check_memory(states[[*layers].index("side_layer")], golden.under(folder), folder)
        assert_trees_close(grads, parameters(golden.under(gradients)), f"gradient {segment}")
