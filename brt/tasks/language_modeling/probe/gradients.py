"""Which parameters the loss reaches, and how far back it reaches through the states."""

import dataclasses
from functools import partial
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from brt import tree_utils
from brt.config import Config
from brt.data.lanes import evaluation_batches
from brt.data.token_store import TokenStore
from brt.distributed.mesh import beside
from brt.layers.stack import ModelState, StackState, runs
from brt.models.decoder import new_state
from brt.tasks.language_modeling.forward import block_nats
from brt.tasks.language_modeling.loss import loss
from brt.tasks.language_modeling.probe.states import recurrent_vectors, with_vectors
from brt.tasks.protocol import Aux
from brt.types import Batch


def gradient_reach(
    config: Config,
    params: PyTree[Array],
    store: TokenStore,
    model_state: ModelState | None = None,
) -> dict[str, Any]:
    """One backward pass of the training loss, over a segment of the longest document.

    The segment is read twice side by side: behind the segment before it, and as a document's
    start, so that the learned initial states take part as well.

    Returns:
      JSON: `parameters`, how many there are; `starved`, those without any gradient, and
      `not_finite`, by name, with their layer; `states`, of every recurrent layer the norms of
      d nats of block n / d states before the segment, for each block n, and `through`, what
      is left of a unit gradient that goes back through its states alone; `verdict`.
    """
    config = _without_dropout(config)
    backward = jax.jit(partial(_backward, config))
    first, batch = _segments(config, store)
    learnt = model_state or {}
    _, carried = backward(params, beside(new_state(config.model, 2), params), learnt, first)
    gradients, _ = backward(params, carried, learnt, batch)
    named = jax.device_get(by_layer(config, gradients))
    starved = [name for name, gradient in named.items() if not np.any(gradient)]
    broken = [name for name, gradient in named.items() if not np.all(np.isfinite(gradient))]
    reach = jax.jit(partial(_state_reach, config))
    blocks, through = jax.device_get(reach(params, carried, learnt, batch))
    found = {
        "parameters": len(named),
        "starved": starved,
        "not_finite": broken,
        "states": [
            {"layer": k, "blocks": norms.tolist(), "through": float(through[k])}
            for k, norms in blocks.items()
        ],
    }
    return found | {"verdict": verdict(found)}


def verdict(found: dict[str, Any]) -> str:
    """The sentence that says whether all of the model can train."""
    starved, count = found["starved"], found["parameters"]
    if found["not_finite"]:
        return f"the gradient of {_listed(found['not_finite'])} is not finite"
    if starved:
        return f"{len(starved)} of {count} parameters get no gradient: {_listed(starved)}"
    if deaf := [f"layer {s['layer']}" for s in found["states"] if not s["through"]]:
        return (
            f"all {count} parameters get a gradient, but none flows back through the states of "
            + ", ".join(deaf)
        )
    return f"all {count} parameters get a gradient"


def by_layer(config: Config, params: PyTree[Array]) -> dict[str, Array]:
    """Parameters by name; those that layers stack are taken apart: `layer_3/tokens/keys`."""
    first, places = 0, {}
    for name, _, count in runs(config.model):
        places[f"stack/{name}/"] = range(first, first + count)
        first += count
    named = {}
    for path, leaf in tree_utils.named(params).items():
        prefix = next((p for p in places if path.startswith(p)), None)
        if prefix is None:
            named[path] = leaf
            continue
        for i, layer in enumerate(places[prefix]):
            named[f"layer_{layer}/{path.removeprefix(prefix)}"] = leaf[i]
    return named


def _listed(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _without_dropout(config: Config) -> Config:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, dropout=0.0))


def _segments(config: Config, store: TokenStore) -> tuple[Batch, Batch]:
    """Two segments from the longest document on; the second also as a document's start."""
    batches = evaluation_batches(
        store, batch_size=1, segment_length=config.training.segment_length,
        window=config.model.window,
    )  # fmt: skip
    found = [batch for batch, _ in islice(batches, 2)]
    if len(found) == 1 or not found[1].scored.all():
        found = [found[0]] * 2  # a segment of mostly padding would say little
    first, second = (jax.tree.map(lambda x: np.repeat(x, 2, axis=0), batch) for batch in found)
    start = second.document_start.copy()
    start[0], start[1, 0] = False, True  # short documents are read on, or nothing would flow
    return first, second._replace(document_start=start)


def _backward(
    config: Config,
    params: PyTree[Array],
    carried: StackState,
    learnt: ModelState,
    batch: Batch,
) -> tuple[PyTree[Array], StackState]:
    """Gradients of a step, and the state after it."""

    def of_params(params: PyTree[Array]) -> tuple[Float[Array, ""], Aux]:
        key = jax.random.key(0)  # of a dropout that is off
        return loss(config, params, jax.lax.stop_gradient(carried), learnt, batch, key)

    gradients, aux = jax.grad(of_params, has_aux=True)(params)
    return gradients, aux.carry


def _state_reach(
    config: Config,
    params: PyTree[Array],
    carried: StackState,
    learnt: ModelState,
    batch: Batch,
) -> tuple[dict[int, Float[Array, " N"]], dict[int, Float[Array, ""]]]:
    """By recurrent layer: of each block's nats, and through the states, in the first lane."""
    before = recurrent_vectors(config.model, carried)
    if not before:
        return {}, {}

    def read(vectors: dict[int, Array]) -> tuple[Float[Array, " N"], dict[int, Array]]:
        state = with_vectors(config.model, carried, vectors)
        nats, after = block_nats(config, params, state, batch, learnt)
        return nats[0], {k: v[0] for k, v in recurrent_vectors(config.model, after).items()}

    (nats, after), pull_back = jax.vjp(read, before)
    blocks, probes = nats.size, nats.size + len(after)
    of_nats = jnp.eye(probes, blocks, dtype=nats.dtype)
    of_states = {}
    for row, (layer, vectors) in enumerate(after.items(), start=blocks):
        unit = jax.random.normal(jax.random.key(layer), vectors.shape)
        unit = unit / jnp.linalg.norm(unit)
        of_states[layer] = jnp.zeros((probes, *unit.shape)).at[row].set(unit)

    def norms(cotangent: tuple[Array, dict[int, Array]]) -> dict[int, Float[Array, ""]]:
        return jax.tree.map(jnp.linalg.norm, jax.tree.map(jnp.ravel, pull_back(cotangent)[0]))

    # One backward pass after the other, of one program.
    reach = jax.lax.map(norms, (of_nats, of_states))
    through = {layer: reach[layer][row] for row, layer in enumerate(after, start=blocks)}
    return {layer: values[:blocks] for layer, values in reach.items()}, through
