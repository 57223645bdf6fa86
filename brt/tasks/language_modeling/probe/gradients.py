"""Measures the gradients of a trained model: parameters without a gradient, and the distance over
which gradients flow back through the recurrent states.

In shapes, N is the number of blocks in the segment that is read.
"""

import dataclasses
from functools import partial
from itertools import islice
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PyTree

from brt.config import Config
from brt.data.lanes import evaluation_batches
from brt.data.token_store import TokenStore
from brt.distributed.mesh import place_like
from brt.formatting import listed
from brt.layers.runs import StackState
from brt.models.decoder import new_state
from brt.tasks.interface import Aux, LossInputs
from brt.tasks.language_modeling.forward import block_nats
from brt.tasks.language_modeling.objective import loss
from brt.tasks.language_modeling.probe.states import layer_states, with_states
from brt.tasks.language_modeling.warm_start import by_layer
from brt.types import Batch, Variables

States: TypeAlias = dict[int, list[Array]]  # The recurrent states of layers, by layer index.


def gradient_reach(config: Config, variables: Variables, store: TokenStore) -> dict[str, Any]:
    """Measures gradients of the training loss over one segment.

    Two rows of a batch read the same segment of the longest document. In the first row, the segment
    continues the document. In the second row, the segment is marked as the start of a document, so
    that the learned initial states receive gradients, too. The result is JSON with these entries:

      parameters  number of parameter arrays
      starved     names of parameters whose gradient is zero
      not_finite  names of parameters with a gradient that is not finite
      states      an entry for every layer with a recurrent state. Its `blocks` has, for each
                  block n, the norm of the gradient of the nats of block n with respect to the
                  layer's state before the segment. Its `through` is the factor by which the norm
                  of a random gradient changes when the gradient flows back from the layer's state
                  after the segment to the layer's state before the segment.
      verdict     a sentence that sums up the other entries
    """
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, dropout=0.0))
    backward = jax.jit(partial(_backward, config))
    first, batch = _segments(config, store)
    empty = place_like(new_state(config.model, 2), variables.params)
    _, carried = backward(variables, empty, first)
    gradients, _ = backward(variables, carried, batch)
    named = jax.device_get(by_layer(gradients, config.model, "layer_{}/"))
    starved = [name for name, gradient in named.items() if not np.any(gradient)]
    broken = [name for name, gradient in named.items() if not np.all(np.isfinite(gradient))]
    reach = jax.jit(partial(_state_reach, config))
    blocks, through = jax.device_get(reach(variables, carried, batch))
    report = {
        "parameters": len(named),
        "starved": starved,
        "not_finite": broken,
        "states": [
            {"layer": k, "blocks": norms.tolist(), "through": float(through[k])}
            for k, norms in blocks.items()
        ],
    }
    return report | {"verdict": verdict(report)}


def verdict(report: dict[str, Any]) -> str:
    """Returns a sentence that sums up the other entries of the result of `gradient_reach`."""
    starved, count = report["starved"], report["parameters"]
    if report["not_finite"]:
        return f"the gradient of {listed(report['not_finite'], 8)} is not finite"
    if starved:
        return f"{len(starved)} of {count} parameters get no gradient: {listed(starved, 8)}"
    if without := [f"layer {s['layer']}" for s in report["states"] if not s["through"]]:
        return (
            f"all {count} parameters get a gradient, but none flows back through the states of "
            + ", ".join(without)
        )
    return f"all {count} parameters get a gradient"


def _segments(config: Config, store: TokenStore) -> tuple[Batch, Batch]:
    """Returns two consecutive segments of the longest document, each for two rows.

    In the second row, the second segment is marked as the start of a document.
    """
    batches = evaluation_batches(
        store, batch_size=1, segment_length=config.training.segment_length,
        window=config.model.block_length,
    )  # fmt: skip
    segments = [batch for batch, _ in islice(batches, 2)]
    if len(segments) == 1 or not segments[1].scored.all():
        # Padding has no loss and so no gradients. Instead of a segment with padding, the first
        # segment is read again.
        segments = [segments[0]] * 2
    first, second = (jax.tree.map(lambda x: np.repeat(x, 2, axis=0), batch) for batch in segments)
    start = second.document_start.copy()
    # Document starts in the first row are removed, because they would stop the flow of gradients.
    start[0], start[1, 0] = False, True
    return first, second._replace(document_start=start)


def _backward(
    config: Config, variables: Variables, carried: StackState, batch: Batch
) -> tuple[PyTree[Array], StackState]:
    """Returns the gradients of the loss of a segment, and the state after the segment."""

    def loss_of_params(params: PyTree[Array]) -> tuple[Float[Array, ""], Aux]:
        # A key selects the forward pass of training. The key's value has no effect, because
        # dropout is off.
        key = jax.random.key(0)
        carry = jax.lax.stop_gradient(carried)
        return loss(config, params, LossInputs(batch, key, carry, variables.model_state))

    gradients, aux = jax.grad(loss_of_params, has_aux=True)(variables.params)
    return gradients, aux.carry


def _state_reach(
    config: Config, variables: Variables, carried: StackState, batch: Batch
) -> tuple[dict[int, Float[Array, " N"]], dict[int, Float[Array, ""]]]:
    """Returns two dicts of gradient norms at the recurrent states before the segment, by layer.

    The first dict has the norm of the gradient of each block's nats in the first row. For the
    second dict, a random cotangent of norm 1 at the layer's state after the segment is pulled back
    through the segment to the states before it. The dict has the norm of the result.
    """
    before = layer_states(config.model, carried)
    if not before:
        return {}, {}

    def read(states: States) -> tuple[Float[Array, " N"], States]:
        """Returns the nats of the blocks of the first row, and the row's states after them."""
        state = with_states(config.model, carried, states)
        nats, after = block_nats(config, variables, state, batch)
        return nats[0], jax.tree.map(lambda x: x[0], layer_states(config.model, after))

    (nats, after), pull_back = jax.vjp(read, before)
    blocks, probes = nats.size, nats.size + len(after)
    nat_cotangents = jnp.eye(probes, blocks, dtype=nats.dtype)
    state_cotangents = {}
    for row, (layer, arrays) in enumerate(after.items(), start=blocks):
        noise = [jax.random.normal(jax.random.key(layer), array.shape) for array in arrays]
        length = optax.tree.norm(noise)
        state_cotangents[layer] = [
            jnp.zeros((probes, *x.shape), array.dtype).at[row].set(x / length)
            for x, array in zip(noise, arrays, strict=True)
        ]

    def norms(cotangent: tuple[Array, States]) -> dict[int, Float[Array, ""]]:
        """Returns the gradient norm at each layer's state before the segment."""
        (gradients,) = pull_back(cotangent)
        return {layer: optax.tree.norm(arrays) for layer, arrays in gradients.items()}

    # lax.map runs one backward pass after the other, which bounds the memory.
    reach = jax.lax.map(norms, (nat_cotangents, state_cotangents))
    through = {layer: reach[layer][row] for row, layer in enumerate(after, start=blocks)}
    return {layer: values[:blocks] for layer, values in reach.items()}, through
