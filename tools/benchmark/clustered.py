"""Measures the time and the error of clustered attention in comparison with full attention.

    python tools/benchmark/clustered.py [--lengths=512,1024,2048,4096,8192,16384,32768]
        [--rounds=8] [--clusters=100] [--top_k=32] [--json=FILE] [--plot=FILE]

Times are measured with one sequence, 4 heads of size 64, float32 and independent normal queries.
Such queries have no clusters, but they cost as much as others. `sdpa` is
jax.nn.dot_product_attention; `full` is a plain softmax of all logits. The functions take turns;
ratios are medians over the rounds. Kinds that compute all logits at once are measured only up to
--full_up_to tokens.

To measure on one thread of a CPU, run

    XLA_FLAGS=--xla_cpu_multi_thread_eigen=false taskset -c 0 python ...

with MALLOC_ARENA_MAX=1 MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=100000000000. Otherwise the system
maps and clears the pages of large arrays in each call, which takes longer than the call itself.

The error is ||y - full|| / ||full||. Reformer uses its queries as keys, so it is compared with full
attention that does the same. The plot shows the times at all lengths, and the error against the
time for several sizes of each kind.
"""

import math
import statistics
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from clustered_kinds import ALL_LOGITS, REGIMES, Operation, of, operations, plain, regime
from conditions import report
from flags import parser
from timing import interleaved, ratio, show

from brt import runtime

Row = dict[str, Any]


def main() -> None:
    args = parser(
        __doc__, lengths=([512 << n for n in range(7)], "tokens"), rounds=8, clusters=100, top_k=32,
        full_up_to=8192, plot=("", "draw times and errors to this file"),
    ).parse_args()  # fmt: skip
    runtime.keep_memory()
    runtime.disable_async_dispatch()
    kinds = operations(args.clusters, args.top_k)
    rows: list[Row] = []
    for tokens in args.lengths:
        found = measured(kinds, tokens, args.rounds, args.full_up_to)
        show(f"{tokens:,} tokens", found)
        rows += found
    for column in ("forward ms", "both ms"):
        print(f"improved_clustered is as fast as sdpa from {crossover(rows, column)} on ({column})")
    print()
    results = {"times": rows, "errors": errors(args.clusters, args.top_k)}
    show("Error at 2,048 tokens", results["errors"])
    if args.plot:
        from clustered_plot import draw

        results["sizes"] = sizes(args.rounds)
        show("Error and forward time at 4,096 tokens", results["sizes"])
        draw(results["times"], results["sizes"], args.plot)
    report(args, results)


def measured(kinds: dict[str, Operation], tokens: int, rounds: int, full_up_to: int) -> list[Row]:
    """Measures each kind at one length: the forward pass, and the gradients of all three inputs."""
    x = regime("random", tokens)
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
            "full / it": _times_faster(times[0], name),
            "both ms": min(times[1][name]),
            "median both": statistics.median(times[1][name]),
            "full / both": _times_faster(times[1], name),
            "MiB": temporary[name],
        }
        for name in forward
    ]


def _times_faster(times: dict[str, list[float]], name: str) -> float:
    return ratio(times, "full", name) if "full" in times else math.nan


def crossover(rows: list[Row], column: str) -> str:
    """Returns the length from which improved clustered attention is not slower than `sdpa`.

    Between the measured lengths, the logarithm of the ratio of the times is interpolated linearly
    in the logarithm of the length.
    """
    sdpa, own = (
        {row["tokens"]: row[column] for row in rows if row["kind"] == kind}
        for kind in ("sdpa", "improved_clustered")
    )
    lengths = sorted(sdpa)
    gaps = [math.log(own[n] / sdpa[n]) for n in lengths]
    if not gaps:
        return "an unknown length"
    if gaps[0] <= 0:
        return f"{lengths[0]:,} tokens or fewer"
    for before, after, a, b in zip(lengths, lengths[1:], gaps, gaps[1:], strict=False):
        if b <= 0:
            return f"{before * (after / before) ** (a / (a - b)):,.0f} tokens"
    return f"more than {lengths[-1]:,} tokens"


def errors(clusters: int, top_k: int, tokens: int = 2048) -> list[Row]:
    """Returns the error of each kind of attention for each of the REGIMES of queries."""
    common = {"clusters": clusters, "top_k": top_k}
    kinds = {
        "clustered": of("clustered", **common),
        "improved_clustered": of("improved_clustered", **common),
        "reformer, 1 round": of("reformer"),
        "reformer, 4 rounds": of("reformer", rounds=4),
        "oracle_top_k": of("oracle_top_k", top_k=top_k),
    }
    rows = []
    for name, kind in kinds.items():
        run = jax.jit(kind)
        rows.append(
            {"kind": name} | {queries: error(run, name, queries, tokens) for queries in REGIMES}
        )
    return rows


def error(run: Operation, name: str, queries: str, tokens: int) -> float:
    q, k, v = regime(queries, tokens)
    k = q if name.startswith("reformer") else k
    exact = plain(q, k, v)
    return float(jnp.linalg.norm(run(q, k, v) - exact) / jnp.linalg.norm(exact))


def sizes(rounds: int, tokens: int = 4096, queries: str = "sharp") -> list[Row]:
    """Measures time and error of each kind with several numbers of clusters or hashing rounds."""
    kinds = {
        f"{kind}, {clusters} clusters": of(kind, clusters=clusters)
        for kind in ("clustered", "improved_clustered")
        for clusters in (25, 50, 100, 200, 400)
    }
    kinds |= {f"reformer, {n} rounds": of("reformer", rounds=n) for n in (1, 2, 4, 8)}
    x = regime(queries, tokens)
    run = {name: jax.jit(kind).lower(*x).compile() for name, kind in kinds.items()}
    times = interleaved({name: partial(one, *x) for name, one in run.items()}, rounds)
    return [
        {
            "kind": name,
            "forward ms": min(times[name]),
            "error": error(one, name, queries, tokens),
        }
        for name, one in run.items()
    ]


if __name__ == "__main__":
    runtime.use_huge_pages()  # brt's commands call this, too.
    main()
