"""Runs the attention kernels on a GPU, and prints how far their results are from the reference.

    python tools/benchmark/gpu_errors.py [--seconds=300]

A row is a case and an implementation. The error is the largest one of the output and of all
gradients: the distance from the result of the reference implementation in float32, divided by the
largest number of the array. "Same bits" says whether a second run gave the same bits. Rows are
printed as soon as they are known, and no case is started after `--seconds`; the first cases are the
most important ones. Functions that return a case take the number of tokens (of a window, a block or
a row) and `width`, the numbers of a head.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from conditions import report
from flags import parser

from brt.config import Attention, CrossAttention
from brt.layers.attention_kinds import clustered_config
from brt.layers.seq2seq import cross_config
from brt.ops import cross_attention
from brt.ops.causal_clustered_attention import (
    CentroidMemory,
    Centroids,
    causal_clustered_attention,
)
from brt.ops.clustered_attention import attend_by_label
from brt.ops.dropout import DropoutMask
from brt.ops.masked_attention import attend as masked_attend
from brt.ops.partial_attention import AttentionPart
from brt.ops.softmax_attention import attend, attend_to_blocks
from brt.ops.window_attention import window_part

HEADS, LANES = 4, 2
IMPLEMENTATIONS = "pallas_gpu", "xla"
Inputs = dict[str, Any]


class Case(NamedTuple):
    """An operation with its inputs.

    Attributes:
      name: the name in the table.
      function: computes the arrays of the result from the inputs and the name of an implementation.
      inputs: the arrays with gradients, by name.
    """

    name: str
    function: Callable[[Inputs, str], tuple[jax.Array, ...]]
    inputs: Inputs


def window(
    tokens: int, width: int, dtype: str = "bfloat16", *, key_heads: int = HEADS,
    dropout: bool = False, scaled: bool = False,
) -> Case:  # fmt: skip
    """Returns a case of window attention to two blocks; in one lane, a document starts between."""
    rng = np.random.default_rng(tokens + width)
    cached = LANES, tokens, key_heads, width
    keys = LANES, 2 * tokens, key_heads, width
    inputs: Inputs = {
        "queries": _normal(rng, (LANES, 2 * tokens, HEADS, width), dtype, width**-0.5),
        "cached": (_normal(rng, cached, dtype), _normal(rng, cached, dtype)),
        "keys": _normal(rng, keys, dtype),
        "values": _normal(rng, keys, dtype),
        "bias": _normal(rng, (HEADS, tokens), "float32"),
    }
    if scaled:
        inputs["scale"] = jnp.arange(1.0, 1 + HEADS)
    others = {"cache_mask": jnp.asarray([[False, True], [True, False]])}
    if dropout:
        kept = jnp.asarray(rng.random((HEADS, tokens, tokens)) < 0.5)
        others["dropout"] = DropoutMask(kept, scale=2.0)

    def function(given: Inputs, implementation: str) -> tuple[jax.Array, ...]:
        return window_part(**given, **others, implementation=implementation)

    marks = {"dropout": dropout, "normalized": scaled}
    marks[f"{key_heads} heads of keys"] = key_heads < HEADS
    name = ", ".join([f"window of {tokens}", f"heads of {width}", dtype, *filter(marks.get, marks)])
    return Case(name, function, inputs)


def states(queries: int, keys: int, width: int, blocks: int) -> Case:
    """Returns a case of attention without bias, such as that of tokens to states."""
    rng = np.random.default_rng(queries + keys + width)
    shape = LANES, blocks, keys, HEADS, width
    inputs = {
        "queries": _normal(rng, (LANES, blocks * queries, HEADS, width), "bfloat16", width**-0.5),
        "keys": _normal(rng, shape, "bfloat16"),
        "values": _normal(rng, shape, "bfloat16"),
    }

    def function(given: Inputs, implementation: str) -> tuple[jax.Array, ...]:
        return (attend(**given, implementation=implementation),)

    name = f"{queries} queries, {keys} keys, heads of {width}, {blocks} blocks"
    return Case(name, function, inputs)


def states_to_blocks(queries: int, tokens: int, width: int) -> Case:
    """Returns a case of attention of states to two blocks; a lane may not read the first block."""
    rng = np.random.default_rng(queries + tokens + width)
    shape = LANES, HEADS, 2 * tokens, width
    inputs = {
        "queries": _normal(rng, (LANES, queries, HEADS, width), "bfloat16", width**-0.5),
        "keys": _normal(rng, shape, "bfloat16"),
        "values": _normal(rng, shape, "bfloat16"),
    }
    readable = jnp.asarray([True, False])

    def function(given: Inputs, implementation: str) -> tuple[jax.Array, ...]:
        options = {"null_keys": False, "implementation": implementation}
        return (attend_to_blocks(**given, cache_mask=readable, **options),)

    name = f"{queries} states to two blocks of {tokens}, heads of {width}"
    return Case(name, function, inputs)


def masked(tokens: int, width: int, dtype: str = "bfloat16", *, biased: bool = True) -> Case:
    """Returns a case of the attention of encoders, whose second row ends with padding."""
    rng = np.random.default_rng(tokens + width)
    shape = LANES, tokens, HEADS, width
    inputs: Inputs = {
        "queries": _normal(rng, shape, dtype, width**-0.5),
        "keys": _normal(rng, shape, dtype),
        "values": _normal(rng, shape, dtype),
        "bias": _normal(rng, (HEADS, tokens, tokens), "float32") if biased else None,
    }
    mask = jnp.asarray(np.arange(tokens) < np.array([[tokens], [tokens // 3]]))[:, None]

    def function(given: Inputs, implementation: str) -> tuple[jax.Array, ...]:
        return (masked_attend(**given, mask=mask, implementation=implementation),)

    bias = "T5's bias" if biased else "no bias"
    name = f"encoder, {tokens} tokens, heads of {width}, {dtype}, {bias}"
    return Case(name, function, inputs)


def clustered(tokens: int, width: int, kind: str) -> Case:
    """Returns a case of clustered attention with 100 clusters; the second row ends with padding.

    In improved clustered attention, the best keys of a cluster may be others in another precision,
    so that single numbers differ by more than the precision: compare with the error of plain XLA.
    """
    rng = np.random.default_rng(tokens + width)
    shape = LANES, tokens, HEADS, width
    names = "queries", "keys", "values"
    inputs = {name: _normal(rng, shape, "bfloat16") for name in names}
    valid = jnp.asarray(np.arange(tokens) < np.array([[tokens], [tokens // 3]]))
    labels = jnp.asarray(rng.integers(0, 100, (LANES, HEADS, tokens)), jnp.int32)
    config = clustered_config(Attention(kind=kind, clusters=100))

    def function(given: Inputs, implementation: str) -> tuple[jax.Array, ...]:
        # XLA would compute sums over constant labels while it compiles, which takes long.
        own = jax.lax.optimization_barrier(labels)
        output = attend_by_label(
            **given, valid=valid, labels=own, config=config, scale=width**-0.5,
            implementation=implementation,
        )  # fmt: skip
        return (output,)

    return Case(f"{kind}, {tokens} tokens, heads of {width}", function, inputs)


def causal_clustered(window: int, width: int) -> Case:
    """Returns a case of causal clustered attention of two blocks, with 64 centroids that keep 16
    keys each. In one row, a document starts in between, and one memory is not full.

    The window's own attention, which is an input, is random.
    """
    rng = np.random.default_rng(window + width)
    tokens, memory = (LANES, 2 * window, HEADS, width), (2, LANES, HEADS, 64)
    inputs: Inputs = {
        "queries": _normal(rng, tokens, "bfloat16", width**-0.5),
        "window": AttentionPart(
            _normal(rng, tokens, "bfloat16"), _normal(rng, tokens[:3], "float32")
        ),
        "keys": _normal(rng, (LANES, 3 * window, HEADS, width), "bfloat16"),
        "values": _normal(rng, (LANES, 3 * window, HEADS, width), "bfloat16"),
        "memory": [
            *(_normal(rng, (*memory, 16, width), "bfloat16") for _ in range(2)),
            _normal(rng, (*memory, width), "float32"),
            _normal(rng, memory, "float32"),
        ],
        "bias": _normal(rng, (HEADS,), "float32"),
    }
    filled = jnp.asarray([[16, 5], [16, 16]])
    cache_mask = jnp.asarray([[False, True], [True, True]])
    # The products of queries and centroids are exact in float32, so that the reference assigns the
    # same centroids to the queries.
    vectors = _normal(rng, (HEADS, 64, width), "float32")
    centroids = Centroids(vectors.astype("bfloat16").astype("float32"), jnp.zeros((HEADS, 64)))

    def function(given: Inputs, implementation: str) -> tuple[jax.Array, ...]:
        output = causal_clustered_attention(
            given["queries"], given["window"], given["keys"], given["values"], cache_mask,
            CentroidMemory(*given["memory"], filled), centroids, given["bias"],
            implementation=implementation,
        )  # fmt: skip
        return (output,)

    return Case(f"causal clustered, windows of {window}, heads of {width}", function, inputs)


def recurrence(tokens: int, width: int) -> Case:
    """Returns a case of SRformer's attention of 128 queries, whose second source ends with padding.

    A state near the threshold may fire in one precision only, so that single numbers differ by more
    than the precision: compare with the error of plain XLA.
    """
    rng, shape = np.random.default_rng(tokens + width), (LANES, tokens, HEADS, width)
    inputs = {
        "queries": _normal(rng, (LANES, 128, HEADS, width), "bfloat16", width**-0.5),
        "keys": _normal(rng, shape, "bfloat16"),
        "values": _normal(rng, shape, "bfloat16"),
        "kernel": _normal(rng, (width, width), "float32", width**-0.5),
    }
    valid = jnp.arange(tokens)[None] < jnp.asarray([[tokens], [tokens // 2]])
    config = cross_config(CrossAttention(kind="srformer", segment_size=64))
    initial = cross_attention.initial_parameters(jax.random.key(0), config, HEADS, width)

    def function(given: Inputs, implementation: str) -> tuple[jax.Array, ...]:
        learned = initial._replace(
            raf=initial.raf._replace(
                kernel=given["kernel"], leak=jnp.float32(0.7), threshold=jnp.float32(4.0)
            )
        )
        output, _ = cross_attention.attend(
            given["queries"], given["keys"], given["values"], valid, learned, config,
            target_length=128, implementation=implementation,
        )  # fmt: skip
        return (output,)

    return Case(f"SRformer, {tokens} tokens, heads of {width}", function, inputs)


def _normal(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: str, scale: float = 1.0
) -> jax.Array:
    return jnp.asarray(scale * rng.normal(size=shape), dtype)


CASES: Sequence[Callable[[], Case]] = (
    partial(window, 128, 64),
    partial(window, 512, 128, scaled=True),
    partial(states, 512, 512, 128, 3),
    partial(states_to_blocks, 512, 512, 128),
    partial(masked, 1024, 64),
    partial(clustered, 4096, 64, "clustered"),
    partial(clustered, 1024, 64, "improved_clustered"),
    partial(recurrence, 1024, 64),
    partial(causal_clustered, 512, 64),
    partial(window, 256, 64, dropout=True),
    partial(window, 256, 128, "float16"),
    partial(states, 128, 128, 64, 2),
    partial(states_to_blocks, 128, 128, 64),
    partial(masked, 384, 128, "float16", biased=False),
    partial(window, 512, 64, key_heads=2),
    partial(window, 512, 256),
    partial(window, 512, 128, dropout=True, scaled=True),
    partial(window, 2048, 64),
    partial(window, 4096, 128),
    partial(states, 512, 512, 256, 1),
)


def computed(case: Case, implementation: str) -> dict[str, np.ndarray]:
    """Returns the results of a case and the gradients of a weighted sum of them, by name.

    The reference reads the inputs in float32.
    """
    inputs = case.inputs
    if implementation == "reference":
        inputs = jax.tree.map(lambda x: x.astype(jnp.float32), inputs)

    def loss(given: Inputs) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        results, rng = case.function(given, implementation), np.random.default_rng(0)
        weights = [jnp.asarray(rng.normal(size=x.shape), jnp.float32) for x in results]
        return sum(jnp.vdot(w, x) for w, x in zip(weights, results, strict=True)), results

    precision = "highest" if implementation == "reference" else "default"
    with jax.default_matmul_precision(precision):
        gradients, results = jax.jit(jax.grad(loss, has_aux=True))(inputs)
    leaves, _ = jax.tree_util.tree_flatten_with_path((results, gradients))
    return {jax.tree_util.keystr(path): np.asarray(x, np.float64) for path, x in leaves}


def measured(case: Case) -> Iterator[dict[str, Any]]:
    """Yields the row of each implementation of a case."""
    expected = computed(case, "reference")
    for implementation in IMPLEMENTATIONS:
        found, again = (computed(case, implementation) for _ in range(2))
        error = max(
            np.abs(found[name] - x).max() / (np.abs(x).max() or 1.0) for name, x in expected.items()
        )
        same = all(np.array_equal(found[name], again[name]) for name in found)
        yield {
            "case": case.name, "implementation": implementation,
            "error": float(error), "same_bits": same,
        }  # fmt: skip


def main() -> None:
    flags = parser(__doc__, seconds=(600.0, "start no case after this time"))
    args, device = flags.parse_args(), jax.devices()[0]
    if device.platform != "gpu":
        flags.error(f"the kernels run on GPUs, and JAX found {device.device_kind}")
    print(f"{'case':85} {'implementation':17} max error  same bits")
    begin, found = time.monotonic(), []
    for make in CASES:
        if time.monotonic() - begin > args.seconds:
            print("the time is over")
            break
        for row in measured(make()):
            found.append(row)
            kind, error, same = f"{row['implementation']:17}", row["error"], row["same_bits"]
            print(f"{row['case']:85} {kind} {error:9.1e}  {'yes' if same else 'no'}", flush=True)
    report(args, found)


if __name__ == "__main__":
    main()
