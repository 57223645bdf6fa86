"""Measures milliseconds per train step of XL, Slide and block-recurrent models, in one run.

    python tools/benchmark/lm_step.py [--size=small|mid|all] [--rounds=40] [--json=FILE]

A step is the forward and backward pass of the language-model loss in float32, without optimizer and
dropout.

The models take turns, so that other work on the machine slows all of them down alike. The table has
the time of each model's fastest round and the median; ratios are medians over rounds. In each
round, programs with nothing but matrix products are measured, too: the products of each model's
compiled step, and the dense products of Slide as jax.numpy computes them.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from conditions import report
from products_alone import products, program

from brt import runtime, tasks
from brt.config import Config, Model, Training
from brt.layers.sections import Recurrence
from brt.models.decoder import new_state
from brt.ops import compiler_options
from brt.tasks.arguments import LossInputs
from brt.training.state import initial_params, parameter_counts
from brt.types import Batch


class Size(NamedTuple):
    """Sizes of the models, tokens of a step, and number of rounds."""

    model: dict[str, int]
    states: int
    tokens: int
    rounds: int


SIZES = {
    "small": Size(
        {"model_dim": 128, "heads": 4, "head_dim": 32, "mlp_dim": 512, "window": 64,
         "vocab_size": 256},
        states=64,
        tokens=512,
        rounds=40,
    ),
    "mid": Size(
        {"model_dim": 256, "heads": 4, "head_dim": 64, "mlp_dim": 1024, "window": 256,
         "vocab_size": 1024},
        states=256,
        tokens=2048,
        rounds=16,
    ),
}  # fmt: skip


def models(size: Size, unroll: int) -> dict[str, tuple[Model, int, int]]:
    """Returns model, lanes and segment length by name; each step has `size.tokens` tokens."""

    def model(layers: int, recurrent: tuple[int, ...] = ()) -> Model:
        return Model(
            layers=layers,
            dtype="float32",
            unroll=unroll,
            **size.model,
            kinds=(Recurrence(layers=recurrent, states=size.states),),
        )

    window = size.model["window"]
    return {
        "XL": (model(4), size.tokens // window, window),
        "Slide": (model(4), 1, size.tokens),
        "Slide:+1": (model(5), 1, size.tokens),
        "Rec:fixed:skip": (model(4, (2,)), 1, size.tokens),
    }


class Timed:
    """A compiled program, its arguments, and the milliseconds of each run."""

    def __init__(self, step: Callable[..., Any], args: tuple) -> None:
        self.step, self.args, self.times = step, args, []
        self.run()
        self.times.clear()

    def run(self) -> None:
        begin = time.perf_counter()
        jax.block_until_ready(self.step(*self.args))
        self.times.append((time.perf_counter() - begin) * 1e3)


def compiled(function: Callable[..., Any], *args: Any) -> Timed:
    return Timed(jax.jit(function).lower(*args).compile(compiler_options.options(width=0)), args)


class Contestant(Timed):
    """The compiled forward and backward pass of a model, and the milliseconds of each run."""

    def __init__(self, model: Model, lanes: int, segment: int) -> None:
        self.model = model
        config = Config(model=model, training=Training(batch_size=lanes, segment_length=segment))
        self.params = jax.tree.map(jnp.asarray, _unboxed(initial_params(config)))
        batch = random_batch(model, lanes, segment)
        args = (self.params, new_state(model, lanes), batch, jax.random.key(2))

        def loss(params, carried, batch, key):
            return tasks.from_config(config).loss(
                config, params, LossInputs(batch, key, carried, {})
            )

        begin = time.perf_counter()
        lowered = jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(*args)
        step = lowered.compile(compiler_options.options(model.model_dim))
        self.compile_seconds = time.perf_counter() - begin
        self.temporary_mib = step.memory_analysis().temp_size_in_bytes / 2**20
        super().__init__(step, args)


def dense_products(model: Model, tokens: int) -> Timed:
    """Compiles all products of vectors and weights in a step, with the gradients of both operands.

    The products are those of the layers and of the loss.
    """
    d, width = model.model_dim, model.heads * model.head_dim
    layer = [(d, width)] * 3 + [(width, d), (d, model.mlp_dim), (model.mlp_dim, d)]
    shapes = [*layer * model.layers, (d, model.vocab_size)]

    def multiply(xs: list, kernels: list, gradients: list) -> list:
        both = (jax.vjp(jnp.matmul, x, kernel) for x, kernel in zip(xs, kernels, strict=True))
        return [(y, back(g)) for (y, back), g in zip(both, gradients, strict=True)]

    def arrays(*sizes: tuple[int, int]) -> list:
        return [jax.random.normal(jax.random.key(i), size) for i, size in enumerate(sizes)]

    args = (
        arrays(*((tokens, inputs) for inputs, _ in shapes)),
        arrays(*shapes),
        arrays(*((tokens, outputs) for _, outputs in shapes)),
    )
    return compiled(multiply, *args)


def random_batch(model: Model, lanes: int, segment: int) -> Batch:
    """Returns random segments in which no document starts."""
    tokens = jax.random.randint(jax.random.key(1), (lanes, segment), 0, model.vocab_size)
    return Batch(
        inputs=tokens,
        targets=jnp.roll(tokens, -1, axis=1),
        scored=jnp.ones(tokens.shape, bool),
        document_start=jnp.zeros((lanes, segment // model.window), bool),
    )


def _unboxed(params):
    import flax.linen as nn

    return nn.meta.unbox(params)


def measure(name: str, rounds: int, unroll: int) -> list[dict[str, object]]:
    """Measures the models of one size and returns a row for each of them."""
    size = SIZES[name]
    sizes = models(size, unroll)
    contestants = {k: Contestant(*v) for k, v in sizes.items()}
    alone = {k: compiled(*program(products(c.step.as_text()))) for k, c in contestants.items()}
    dense = dense_products(sizes["Slide"][0], size.tokens)
    for _ in range(rounds or size.rounds):
        for timed in (*contestants.values(), *alone.values(), dense):
            timed.run()
    rows = []
    for key, c in contestants.items():
        best, median = min(c.times), sorted(c.times)[len(c.times) // 2]
        total, non_embedding = parameter_counts(c.params)
        rows.append(
            {
                "size": name,
                "model": key,
                "parameters": total,
                "parameters_non_embedding": non_embedding,
                "milliseconds_per_step": best,
                "median_milliseconds_per_step": median,
                "tokens_per_second": size.tokens / best * 1e3,
                "times": c.times,
                "compile_seconds": c.compile_seconds,
                "temporary_mib": c.temporary_mib,
                "products_times": alone[key].times,
                "dense_products_times": dense.times if key == "Slide" else None,
            }
        )
    return rows


def show(rows: list[dict[str, object]]) -> None:
    """Prints a table, and the ratios of times that the paper compares."""
    print(
        f"{'size':6} {'model':15} {'parameters':>10} {'ms/step':>8} {'median':>8} "
        f"{'tokens/s':>9} {'compile s':>9} {'temp MiB':>8} "
        f"{'products ms':>11} {'step / these':>12}"
    )
    for r in rows:
        print(
            f"{r['size']:6} {r['model']:15} {r['parameters']:>10,} "
            f"{r['milliseconds_per_step']:>8.1f} {r['median_milliseconds_per_step']:>8.1f} "
            f"{r['tokens_per_second']:>9,.0f} {r['compile_seconds']:>9.1f} "
            f"{r['temporary_mib']:>8.0f} "
            f"{min(r['products_times']):>11.1f} {_ratio(r['times'], r['products_times']):>12.2f}"
        )
    for size in dict.fromkeys(r["size"] for r in rows):
        times = {r["model"]: r["times"] for r in rows if r["size"] == size}
        pairs = (("Rec:fixed:skip", "Slide:+1"), ("Slide", "XL"))
        ratios = (f"{a} / {b} = {_ratio(times[a], times[b]):.2f}" for a, b in pairs)
        print(f"{size}, median over rounds: {', '.join(ratios)}")
        slide = next(r for r in rows if r["size"] == size and r["model"] == "Slide")
        products = slide["dense_products_times"]
        print(
            f"{size}, Slide's dense products alone: {min(products):.1f} ms, "
            f"Slide / these = {_ratio(slide['times'], products):.2f}"
        )


def _ratio(a: list[float], b: list[float]) -> float:
    """Returns the median of the ratios of two programs in the same round."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=[*SIZES, "all"], default="all")
    parser.add_argument("--rounds", type=int, default=0, help="0: 40 of small, 16 of mid")
    parser.add_argument("--unroll", type=int, default=0, help="layers and blocks per iteration")
    parser.add_argument("--json", help="write the rows to this file")
    args = parser.parse_args()
    runtime.keep_memory()
    runtime.disable_async_dispatch()
    names = list(SIZES) if args.size == "all" else [args.size]
    rows = [row for name in names for row in measure(name, args.rounds, args.unroll)]
    show(rows)
    measured = {
        f"{name}, {key}": model
        for name in names
        for key, (model, *_) in models(SIZES[name], args.unroll).items()
    }
    report(args, rows, measured)


if __name__ == "__main__":
    runtime.use_huge_pages()  # brt's commands call this, too.
    main()
