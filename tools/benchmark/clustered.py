"""What clustered attention costs, and how close it comes, against full attention.

    python tools/benchmark/clustered.py [--lengths=512,1024,2048,4096,8192] [--rounds=8]
        [--clusters=100] [--top_k=32] [--json=FILE]

One sequence, 4 heads of 64, float32, independent normal queries (which no clustering helps, and
which cost the same as others). `sdpa` is jax.nn.dot_product_attention, `full` the softmax of all
logits as it is written down. Functions take turns; ratios are medians over the rounds. On one
thread: `taskset -c 0 python ...`. Kinds whose logits all exist stop at --full_up_to tokens.

The errors are ||y - full|| / ||full|| of 2,048 tokens: independent queries, queries around 50
modes (`tight`, `sharp`: more weight on few keys), and queries that each look for a key of
their own (`retrieval`).
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from timing import interleaved, ratio, show

from brt import allocator
from brt.config import Attention
from brt.ops.attention import attend
from brt.ops.causal_clustered_attention import (
    Centroids,
    Past,
    causal_clustered_attention,
    past_scan,
)
from brt.ops.window_attention import window_part

HEADS, WIDTH, WINDOW = 4, 64, 256
ALL_LOGITS = ("full", "oracle_top_k")

Operation = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lengths", default="512,1024,2048,4096,8192", help="tokens")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--clusters", type=int, default=100)
    parser.add_argument("--top_k", type=int, default=32)
    parser.add_argument("--full_up_to", type=int, default=8192)
    parser.add_argument("--json", help="write the rows to this file")
    args = parser.parse_args()
    allocator.keep_memory()
    device = jax.devices()[0]
    print(f"jax {jax.__version__}, {len(jax.devices())} x {device.device_kind}, float32\n")
    kinds = operations(args.clusters, args.top_k)
    lengths = [int(n) for n in args.lengths.split(",")]
    rows = []
    for tokens in lengths:
        found = measured(kinds, tokens, args.rounds, args.full_up_to)
        show(f"{tokens:,} tokens", found)
        rows += found
    for column in ("forward ms", "both ms"):
        print(f"improved_clustered is as fast as sdpa from {crossover(rows, column)} on ({column})")
    print()
    found = errors(args.clusters, args.top_k)
    show("Error at 2,048 tokens", found)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"times": rows, "errors": found}, file, indent=1)


def operations(clusters: int, top_k: int) -> dict[str, Operation]:
    """Attention of [1, T, H, K] queries, keys and values of every kind."""
    sizes = {"clusters": clusters, "top_k": top_k}
    configs = {
        "full": Attention(),
        "clustered": Attention(kind="clustered", **sizes),
        "improved_clustered": Attention(kind="improved_clustered", **sizes),
        "reformer, 1 round": Attention(kind="reformer"),
        "reformer, 4 rounds": Attention(kind="reformer", rounds=4),
        "oracle_top_k": Attention(kind="oracle_top_k", top_k=top_k),
    }
    kinds: dict[str, Operation] = {"sdpa": jax.nn.dot_product_attention}
    kinds |= {name: partial(_attend, config=config) for name, config in configs.items()}
    kinds["full"] = plain
    kinds["sdpa, causal"] = partial(jax.nn.dot_product_attention, is_causal=True)
    kinds["causal clustered"] = partial(_causal, clusters=64, top_k=16)
    return kinds


def plain(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Full attention, unfused."""
    logits = jnp.einsum("bqhk,bshk->bhqs", q * WIDTH**-0.5, k)
    return jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(logits), v)


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, config: Attention) -> jax.Array:
    return attend(q, k, v, jnp.ones(q.shape[:2], bool), config, jax.random.key(0))


def _causal(q: jax.Array, k: jax.Array, v: jax.Array, clusters: int, top_k: int) -> jax.Array:
    q = q * WIDTH**-0.5
    before = ((0, 0), (WINDOW, 0), (0, 0), (0, 0))
    k, v = jnp.pad(k, before), jnp.pad(v, before)
    readable = jnp.arange(q.shape[1] // WINDOW)[None] > 0
    vectors = jax.random.normal(jax.random.key(1), (HEADS, clusters, WIDTH)) * WIDTH**-0.5
    centroids = Centroids(vectors, jnp.zeros((HEADS, clusters)))
    best = jnp.zeros((1, HEADS, clusters, top_k, WIDTH))
    past = Past(best, best, best[..., 0, :], best[..., 0, 0], jnp.zeros((1,), jnp.int32))
    _, pasts = past_scan(k, v, readable, past, centroids)
    window = window_part(q, k, v, None, readable)
    bias = jnp.zeros((HEADS,))
    return causal_clustered_attention(q, window, k, v, readable, pasts, centroids, bias)


def measured(
    kinds: dict[str, Operation], tokens: int, rounds: int, full_up_to: int
) -> list[dict[str, Any]]:
    """Times of each kind at a length: forward, and with the gradients of all three inputs."""
    x = jax.random.normal(jax.random.key(0), (3, 1, tokens, HEADS, WIDTH))
    forward, both, temporary = {}, {}, {}
    for name, kind in kinds.items():
        if name in ALL_LOGITS and tokens > full_up_to:
            continue

        def loss(*x: jax.Array, kind: Operation = kind) -> jax.Array:
            return jnp.sum(kind(*x) ** 2)

        forward[name] = partial(jax.jit(kind).lower(*x).compile(), *x)
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*x).compile()
        both[name] = partial(compiled, *x)
        temporary[name] = compiled.memory_analysis().temp_size_in_bytes / 2**20
        print(f"compiled {name}, {tokens} tokens", file=sys.stderr)
    times = interleaved(forward, rounds), interleaved(both, rounds)
    return [
        {
            "kind": name,
            "tokens": tokens,
            "forward ms": min(times[0][name]),
            "median": statistics.median(times[0][name]),
            "of sdpa": ratio(times[0], name, "sdpa"),
            "both ms": min(times[1][name]),
            "median both": statistics.median(times[1][name]),
            "both of sdpa": ratio(times[1], name, "sdpa"),
            "MiB": temporary[name],
        }
        for name in forward
    ]


def crossover(rows: list[dict[str, Any]], column: str) -> str:
    """The length from which on it is not slower, on straight lines between logarithms."""
    times = {kind: _by_length(rows, kind, column) for kind in ("sdpa", "improved_clustered")}
    lengths = sorted(times["sdpa"])
    gaps = [math.log(times["improved_clustered"][n] / times["sdpa"][n]) for n in lengths]
    if gaps[0] <= 0:
        return f"{lengths[0]:,} tokens or fewer"
    for before, after, a, b in zip(lengths, lengths[1:], gaps, gaps[1:], strict=False):
        if b <= 0:
            return f"{before * (after / before) ** (a / (a - b)):,.0f} tokens"
    return f"more than {lengths[-1]:,} tokens"


def _by_length(rows: list[dict[str, Any]], kind: str, column: str) -> dict[int, float]:
    return {row["tokens"]: row[column] for row in rows if row["kind"] == kind}


def errors(clusters: int, top_k: int, tokens: int = 2048) -> list[dict[str, Any]]:
    """Distance to full attention, of several kinds of queries."""
    common = {"clusters": clusters, "top_k": top_k}
    configs = {
        "clustered": Attention(kind="clustered", **common),
        "improved_clustered": Attention(kind="improved_clustered", **common),
        "lse_jensen": Attention(kind="improved_clustered", mass_rule="lse_jensen", **common),
        "oracle_top_k": Attention(kind="oracle_top_k", top_k=top_k),
    }
    rows = []
    for name, config in configs.items():
        row: dict[str, Any] = {"kind": name}
        for regime in ("random", "tight", "sharp", "retrieval"):
            x = regimes(regime, tokens)
            exact = plain(*x)
            away = jax.jit(partial(_attend, config=config))(*x) - exact
            row[regime] = float(jnp.linalg.norm(away) / jnp.linalg.norm(exact))
        rows.append(row)
    return rows


def regimes(name: str, tokens: int) -> tuple[jax.Array, ...]:
    """Queries, keys and values of one kind."""
    draw = np.random.default_rng(0)
    q, k, v = draw.normal(size=(3, 1, tokens, HEADS, WIDTH))
    modes = draw.normal(size=(1, 50, HEADS, WIDTH))
    if name in ("tight", "sharp"):
        around = modes[:, draw.integers(50, size=tokens)]
        q = around + 0.1 * q if name == "tight" else 3 * (around + 0.3 * q)
    elif name == "retrieval":
        q = 1.5 * k[:, draw.permutation(tokens)] + 0.3 * q
    return tuple(jnp.asarray(a, jnp.float32) for a in (q, k, v))


if __name__ == "__main__":
    main()
