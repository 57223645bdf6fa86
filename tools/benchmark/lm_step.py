"""Measures milliseconds per train step of XL, Slide and block-recurrent models, in one run.

    python tools/benchmark/lm_step.py [--size=small|mid|all] [--rounds=40] [--json=FILE]

A step is the forward and backward pass of the language-model loss in float32, without optimizer and
dropout.

The models take turns, so that other work on the machine slows all of them down alike. The table has
the time of each model's fastest round and the median; ratios are medians over rounds. In each
round, programs with nothing but matrix products are measured, too: the products of each model's
compiled step, and the dense products of Slide as jax.numpy computes them.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from conditions import report
from flags import parser
from products_alone import products, program
from timing import interleaved, ratio, show

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


class Step:
    """The compiled forward and backward pass of a model with random parameters."""

    def __init__(self, model: Model, lanes: int, segment: int) -> None:
        self.model = model
        config = Config(model=model, training=Training(batch_size=lanes, segment_length=segment))
        self.params = jax.tree.map(jnp.asarray, nn.meta.unbox(initial_params(config)))
        batch = random_batch(model, lanes, segment)
        args = (self.params, new_state(model, lanes), batch, jax.random.key(2))

        def loss(params, carried, batch, key):
            return tasks.from_config(config).loss(
                config, params, LossInputs(batch, key, carried, {})
            )

        begin = time.perf_counter()
        lowered = jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(*args)
        self.step = lowered.compile(compiler_options.options(model.model_dim))
        self.compile_seconds = time.perf_counter() - begin
        self.temporary_mib = self.step.memory_analysis().temp_size_in_bytes / 2**20
        self.run = partial(self.step, *args)

    def row(self, name: str, times: dict[str, list[float]]) -> dict[str, Any]:
        """Returns what tables of steps say of the model `name`."""
        return {
            "model": name,
            "parameters": parameter_counts(self.params)[0],
            "milliseconds": min(times[name]),
            "median": statistics.median(times[name]),
            "temporary_mib": self.temporary_mib,
        }


def compiled(function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    lowered = jax.jit(function).lower(*args)
    return partial(lowered.compile(compiler_options.options(width=0)), *args)


def dense_products(model: Model, tokens: int) -> Callable[[], Any]:
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


def measure(name: str, rounds: int, unroll: int) -> list[dict[str, Any]]:
    """Measures the models of one size and returns a row for each of them."""
    size = SIZES[name]
    sizes = models(size, unroll)
    steps = {key: Step(*given) for key, given in sizes.items()}
    functions = {key: one.run for key, one in steps.items()}
    functions |= {
        f"{key}, products": compiled(*program(products(one.step.as_text())))
        for key, one in steps.items()
    }
    functions["dense"] = dense_products(sizes["Slide"][0], size.tokens)
    times = interleaved(functions, rounds or size.rounds)
    rows = []
    for key, one in steps.items():
        row = one.row(key, times)
        row["tokens/s"] = round(size.tokens / row["milliseconds"] * 1e3)
        row["compile s"] = one.compile_seconds
        row["products ms"] = min(times[f"{key}, products"])
        row["of products"] = ratio(times, key, f"{key}, products")
        rows.append(row)
    show(f"A step, {name}", rows)
    pairs = ("Rec:fixed:skip", "Slide:+1"), ("Slide", "XL"), ("Slide", "dense")
    ratios = {f"{a} / {b}": ratio(times, a, b) for a, b in pairs}
    print(", ".join(f"{pair} = {value:.2f}" for pair, value in ratios.items()), "\n")
    return [{"size": name, **row, **ratios} for row in rows]


def main() -> None:
    flags = parser(
        __doc__, size=("all", f"of {', '.join(SIZES)}"), rounds=(0, "0: 40 of small, 16 of mid"),
        unroll=(0, "layers and blocks per iteration"),
    )  # fmt: skip
    args = flags.parse_args()
    runtime.keep_memory()
    runtime.disable_async_dispatch()
    names = list(SIZES) if args.size == "all" else [args.size]
    rows = [row for name in names for row in measure(name, args.rounds, args.unroll)]
    measured = {
        f"{name}, {key}": model
        for name in names
        for key, (model, *_) in models(SIZES[name], args.unroll).items()
    }
    report(args, rows, measured)


if __name__ == "__main__":
    runtime.use_huge_pages()  # brt's commands call this, too.
    main()
