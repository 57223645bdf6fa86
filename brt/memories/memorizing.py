"""Layers that also attend to a few tokens of a long memory, which a search selects for each query
(Memorizing Transformers, arXiv 2203.08913, section 3).

For each head of a query, the search selects the few keys of the memory with the largest products
with the query. These keys are the query's neighbours. The memory gets no gradient: gradients reach
the queries only.

In shapes, M is the number of tokens of the memory, Q of queries, R of neighbours of a query, and Z
of keys of the memory and the segment together. Heads come before tokens in keys and values, because
every head is searched separately. Each of G heads of keys serves H / G consecutive heads of
queries. The other letters of shapes are those of `brt.layers.state`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.config import Model
from brt.config.checks import check
from brt.config.fields import adaptable
from brt.config.kinds import KindSection
from brt.layers.kinds import LayerKind, register_kind
from brt.layers.window import window_flops
from brt.memories.past_tokens import (
    MemoryAndSegment,
    PastTokensLayer,
    Readers,
    check_reach,
    memory_state,
)
from brt.ops import dispatch
from brt.ops.dispatch import Implementation, Op
from brt.ops.grouped_heads import heads_to_tokens, tokens_to_heads
from brt.ops.partial_attention import AttentionPart
from brt.ops.softmax import MASKED, safe_softmax
from brt.ops.top_k import take, top_k


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memorizing(KindSection):
    """Settings of layers that attend to the results of a search in a long memory."""

    kind: ClassVar[str] = "memorizing"
    any_window: ClassVar[bool] = True
    grouped_keys: ClassVar[bool] = True
    positive: ClassVar[tuple[str, ...]] = ("size", "neighbors")

    layers: tuple[int, ...] = adaptable(())  # The layers with these indices are of this kind.
    size: int = adaptable(32768)  # The memory has this many tokens.
    neighbors: int = adaptable(128)  # A query reads this many tokens of the memory.
    # "exact" finds the tokens whose keys have the largest products with the query. "bucketed"
    # divides the memory into `neighbors` buckets and finds the best token of each bucket, as the
    # authors' code does.
    search: Literal["exact", "bucketed"] = adaptable("exact")
    # A gate for each head mixes attention to the memory and attention to the window. With the gate
    # of the paper, "sigmoid", the layer has no positions, and the gate is half open in a new model.
    # With "tanh", the window has the model's positions, and the gate is closed in a new model,
    # which therefore computes the same as the model without a memory.
    gate: Literal["sigmoid", "tanh"] = adaptable("sigmoid")

    def __post_init__(self) -> None:
        super().__post_init__()
        check(
            not self.layers or self.neighbors <= self.size,
            f"Memorizing.neighbors = {self.neighbors} must not be above "
            f"Memorizing.size = {self.size}",
        )
        check(
            not self.layers or self.search == "exact" or self.size % self.neighbors == 0,
            f"Memorizing.size = {self.size} must be a multiple of Memorizing.neighbors = "
            f"{self.neighbors} where Memorizing.search = 'bucketed'",
        )

    def check_model(self, model: Model) -> None:
        check_reach("Memorizing.layers", self.layers, model)

    def check_segment(self, name: str, length: int) -> None:
        """Raises ConfigError if `length`, the setting `name`, exceeds the size of the memory."""
        check(
            self.size >= length,
            f"Memorizing.size = {self.size} must not be below {name} = {length}",
        )


class Search(NamedTuple):
    """How the queries of a block find their neighbours, and how missing neighbours count."""

    size: int  # M, the number of tokens before the block among which queries search
    neighbors: int  # R
    # "exact" finds the keys with the largest products. "bucketed" divides the tokens among R
    # buckets and finds the best key of each bucket. M must then be a multiple of R.
    how: Literal["exact", "bucketed"] = "exact"
    # True makes missing neighbours count as zero keys with zero values, as in the original code;
    # False ignores them.
    null_keys: bool = False


class Neighbors(NamedTuple):
    """The neighbours of every query, in no particular order.

    `there` is False where a neighbour is missing, because there are fewer than R keys or a bucket
    is empty. The index of a missing neighbour has no meaning.
    """

    indices: Int[Array, "B H Q R"]
    there: Bool[Array, "B H Q R"]


def find_neighbors(
    queries: Float[Array, "B H Q K"],
    keys: Float[Array, "B H M K"],
    count: Int[Array, " B"],
    search: Search,
) -> Neighbors:
    """Returns the R neighbours of every query among the last `count` of the M keys.

    The score of a key is its product with the query, so multiplying queries by a positive number
    does not change the result. All [B, H, Q, M] scores are computed at once, so the caller limits
    Q.
    """
    scores = jnp.einsum("bhqk,bhmk->bhqm", queries, keys, preferred_element_type=jnp.float32)
    size = keys.shape[2]
    mask = jnp.arange(size)[None] >= size - count[:, None]
    scores = jnp.where(mask[:, None, None], scores, -jnp.inf)
    best, indices = (top_k if search.how == "exact" else _top_of_buckets)(scores, search.neighbors)
    return Neighbors(indices, best > -jnp.inf)


def _top_of_buckets(scores: Float[Array, "B H Q M"], buckets: int) -> tuple[Array, Array]:
    by_bucket = scores.reshape(*scores.shape[:3], -1, buckets)
    place = jnp.argmax(by_bucket, axis=3).astype(jnp.int32)
    return jnp.max(by_bucket, axis=3), place * buckets + jnp.arange(buckets)[None, None, None]


def attend_to_neighbors(
    queries: Float[Array, "B H Q K"],
    keys: Float[Array, "B H Q R K"],
    values: Float[Array, "B H Q R K"],
    there: Bool[Array, "B H Q R"],
    *,
    null_keys: bool,
) -> Float[Array, "B H Q K"]:
    """Returns the attention output of every query over its R neighbours; queries are already
    scaled.

    With `null_keys`, missing neighbours count as zero keys with zero values. Without it, they are
    ignored.
    """
    logits = jnp.einsum("bhqk,bhqrk->bhqr", queries, keys, preferred_element_type=jnp.float32)
    weights = safe_softmax(jnp.where(there, logits, 0.0 if null_keys else MASKED))
    weights = jnp.where(there, weights, 0).astype(values.dtype)
    return jnp.einsum("bhqr,bhqrk->bhqk", weights, values)


def reference_attention(
    queries: Float[Array, "B T H K"],
    keys: Float[Array, "B H Z K"],
    values: Float[Array, "B H Z K"],
    counts: Int[Array, "B N"],
    search: Search,
) -> Float[Array, "B T H K"]:
    """Computes `memory_attention`, with all scores of a block at once.

    If S heads of queries share a head of keys, the S queries of a token are consecutive entries of
    axis T. T is then S times the number of tokens.
    """
    blocks = counts.shape[1]
    width, window = queries.shape[1] // blocks, _window(keys, counts, search)
    outputs = []
    for n in range(blocks):
        q = queries[:, n * width : (n + 1) * width].swapaxes(1, 2)
        seen = slice(n * window, n * window + search.size)
        results = find_neighbors(jax.lax.stop_gradient(q), keys[:, :, seen], counts[:, n], search)
        k, v = (take(x[:, :, seen], results.indices) for x in (keys, values))
        outputs.append(attend_to_neighbors(q, k, v, results.there, null_keys=search.null_keys))
    return jnp.concatenate(outputs, axis=2).swapaxes(1, 2)


def _window(keys: Float[Array, "B H Z K"], counts: Int[Array, "B N"], search: Search) -> int:
    # Returns the number of tokens from one block to the next; 0 if `keys` are the memory alone.
    return (keys.shape[2] - search.size) // counts.shape[1]


# For a row of the batch, an array of scores, retrieved keys or retrieved values has at most this
# number of elements (32 MiB in float32), unless one query in all heads needs more.
AT_ONCE = 2**23


def xla_attention(
    queries: Float[Array, "B T H K"],
    keys: Float[Array, "B H Z K"],
    values: Float[Array, "B H Z K"],
    counts: Int[Array, "B N"],
    search: Search,
) -> Float[Array, "B T H K"]:
    """Computes `memory_attention`, a few queries at a time to limit the number of scores. The axis
    T is the same as in `reference_attention`.

    The first of two passes searches and stores only the indices of the neighbours. The second pass
    gathers the keys and values of the neighbours and attends to them. The gathered keys and values
    take R times as much space as the queries. They are therefore not stored, and the backward pass
    gathers them again.
    """
    by_head = queries.swapaxes(1, 2)
    # The search has no gradient, so the backward pass needs only the neighbours and no scores. But
    # the scores are results of products, which a layer may store even if its backward pass
    # recomputes most results. `input_residual` marks the neighbours, so that such a layer stores
    # the neighbours instead of the scores.
    found = _find_in_blocks(*jax.lax.stop_gradient((by_head, keys)), counts, search)
    results = jax.tree.map(dispatch.input_residual, found)

    @jax.checkpoint
    def attend(q: Float[Array, "B H Q K"], results: Neighbors) -> Float[Array, "B H Q K"]:
        k, v = take(keys, results.indices), take(values, results.indices)
        return attend_to_neighbors(q, k, v, results.there, null_keys=search.null_keys)

    _, heads, tokens, width = by_head.shape
    rows = _rows(tokens, heads * search.neighbors * width)
    return _by_rows(attend, rows, by_head, results).swapaxes(1, 2)


def _find_in_blocks(
    queries: Float[Array, "B H T K"],
    keys: Float[Array, "B H Z K"],
    counts: Int[Array, "B N"],
    search: Search,
) -> Neighbors:
    # The resulting indices refer to `keys`.
    batch, heads, tokens, width = queries.shape
    blocks, window = counts.shape[1], _window(keys, counts, search)
    rows = _rows(tokens // blocks, heads * search.size)

    def search_block(n: Array, q: Float[Array, "B H Q K"], count: Int[Array, " B"]) -> Neighbors:
        seen = jax.lax.dynamic_slice_in_dim(keys, n * window, search.size, axis=2)

        results = _by_rows(lambda q: find_neighbors(q, seen, count, search), rows, q)
        return results._replace(indices=results.indices + n * window)

    split = jnp.moveaxis(queries.reshape(batch, heads, blocks, -1, width), 2, 0)
    results = jax.lax.map(lambda block: search_block(*block), (jnp.arange(blocks), split, counts.T))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 2).reshape(batch, heads, tokens, -1), results)


def _rows(queries: int, each: int) -> int:
    # Returns the number of queries to process at once: the largest divisor of `queries` for which
    # arrays with `each` elements per query have at most `AT_ONCE` elements, or 1.
    limit = min(queries, max(AT_ONCE // each, 1))
    return next(rows for rows in range(limit, 0, -1) if queries % rows == 0)


def _by_rows(function: Callable[..., Any], rows: int, *arrays: Any) -> Any:
    # Applies the function to arrays [B, H, Q, ...], `rows` queries (axis 2) at a time.
    def cut(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(*x.shape[:2], -1, rows, *x.shape[3:]), 2, 0)

    def joined(x: Array) -> Array:
        x = jnp.moveaxis(x, 0, 2)
        return x.reshape(*x.shape[:2], -1, *x.shape[4:])

    results = jax.lax.map(lambda part: function(*part), jax.tree.map(cut, arrays))
    return jax.tree.map(joined, results)


OP = Op(
    "memory_attention",
    (
        Implementation("xla", xla_attention),
        Implementation("reference", reference_attention),
    ),
)


def memory_attention(
    queries: Float[Array, "B T H K"],
    keys: Float[Array, "B G Z K"],
    values: Float[Array, "B G Z K"],
    counts: Int[Array, "B N"],
    search: Search,
    implementation: str | None = None,
) -> Float[Array, "B T H K"]:
    """Returns the attention output of every token over its neighbours in the memory, in the dtype
    of `values`; zeros where a query has no neighbours.

    The queries belong to N blocks of W = T / N tokens. A block sees the M tokens before the block.
    `keys` has the memory before the segment, followed by the segment's tokens, so the tokens that
    block n sees begin at index n * W. With one block, `keys` may be the memory alone.

    The number of scores, of retrieved keys and of retrieved values that exist at once is limited by
    `AT_ONCE`, also in the backward pass.

    Args:
      queries: the queries, already scaled. A positive scale does not change the neighbours.
      keys, values: the keys and values, oldest token first.
      counts: how many of the last tokens before each block may be neighbours, at most M.
      implementation: None selects the best implementation that supports the inputs.
    """
    keys, values = jax.lax.stop_gradient((keys, values))
    heads = queries.shape[2]
    by_group = heads_to_tokens(queries, keys.shape[1])
    found = dispatch.run(OP, implementation, by_group, keys, values, counts, search)
    return tokens_to_heads(found, heads)


def memory_flops(model: Model) -> int:
    """Returns the FLOPs per token of a sliding-window layer, of the search in the memory, and of
    attention to the keys that the search returns.
    """
    section = model.of(Memorizing)
    width = model.heads * model.head_dim
    searching = 2 * width * section.size + 4 * width * section.neighbors
    return window_flops(model) + searching


class MemorizingLayer(PastTokensLayer):
    """A layer of the Memorizing Transformer.

    A token attends to its window and, separately, to the results of a search in the memory of the
    tokens before its block (Memorizing Transformers, section 3). A learned gate of each head mixes
    the two outputs. With `Memorizing.gate` = "sigmoid", the layer has no positions, as in the
    original recipe. With "tanh", the window has the model's positions.
    """

    def window_positions(self) -> str:
        return self.model.positions if self.model.of(Memorizing).gate == "tanh" else "none"

    def mix(
        self,
        queries: Float[Array, "B T H K"],
        window: AttentionPart,
        past: MemoryAndSegment,
        readers: Readers,
    ) -> Float[Array, "B T H K"]:
        section, local, counts = self.model.of(Memorizing), window.output, readers.counts
        null_keys = not self.model.sliding.mask_empty_cache
        search = Search(section.size, section.neighbors, section.search, null_keys)
        remembered_output = memory_attention(
            queries, *past, counts, search, self.kernels.memory_attention
        )
        # A block that can read no token of the memory has a closed gate, unless missing keys count
        # as keys of zeros (`null_keys`).
        open_gate = (counts > 0) | null_keys
        bounded = jnp.tanh if section.gate == "tanh" else jax.nn.sigmoid
        gate = jnp.where(open_gate[:, :, None], bounded(self.memory_gate)[None, None], 0)
        gate = jnp.repeat(gate, local.shape[1] // counts.shape[1], axis=1)
        gate = gate.astype(local.dtype)[..., None]
        return local * (1 - gate) + remembered_output * gate


register_kind(
    "memorizing",
    LayerKind(
        MemorizingLayer, lambda model: memory_state(model, model.of(Memorizing).size),
        {"cache": ("window",), "memory": ("keys", "values", "length")}, memory_flops, Memorizing,
    ),
)  # fmt: skip
