"""Measures tokens per second and MFU of the train step, by model and implementation, in one run.

    python tools/benchmark/train_step.py [--size=paper|small] [--tokens=131072] [--rounds=5]
        [--models=Slide:13L,Rec:fixed:skip] [--implementations=window_attention:xla,pallas_tpu]
        [--dtype=bfloat16] [--gin_bindings='Model.dropout = 0.1'] [--json=FILE]

The models are rows of the paper's Table 1. A train step includes the optimizer (Adafactor), but no
dropout unless a binding sets it, and runs on one device with random tokens. Models and
implementations take turns in one process. A chain of large matrix products is measured in the same
rounds, because it shows the speed that the device reaches at best. The column MFU is relative to
the peak of the data sheet; the column "of product" is relative to the speed of the large products.
Figures are medians over the rounds; a ratio is the median of the ratios within a round.
"""

import argparse
import statistics
import sys
from functools import partial
from typing import Any

import jax
from compiled import variants
from conditions import report
from flags import parser
from lm_step import random_batch
from table1_step import BASELINE, PAPER, SIZES, USUAL, row
from timing import interleaved, ratio, show

from brt import command_line
from brt.config import Config
from brt.distributed.mesh import by_lane, use
from brt.errors import ConfigError
from brt.models.decoder import forward_flops_per_token
from brt.ops import compiler_options
from brt.training import run as runs
from brt.training.chips import peak_flops
from brt.training.layer_forms import conversions

PRODUCT = "product"
CHAINED = 8  # number of products in one program, so that the time to start it does not matter


class Contestant:
    """A compiled train step and its current state."""

    def __init__(self, config: Config):
        self.model, training = config.model, config.training
        shapes = runs.compute_shapes(config)
        batch = random_batch(self.model, training.batch_size, training.segment_length)
        options = compiler_options.options(self.model.model_dim)
        self.step = runs.lowered_step(config, shapes, batch).compile(options)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, shapes.state_shapes)
        init = partial(runs.initial_state, config, shapes.optimizer)
        with use(shapes.mesh):
            state = jax.jit(init, out_shardings=shardings)()
        for_step, _ = conversions(config, shapes.state_shapes, shapes.mesh)
        self.state = for_step(state)
        self.batch = jax.device_put(batch, by_lane(shapes.mesh))
        self.key = jax.random.key(training.seed)
        memory = self.step.memory_analysis()
        results = memory.output_size_in_bytes - memory.alias_size_in_bytes
        self.bytes = memory.argument_size_in_bytes + results + memory.temp_size_in_bytes

    def run(self) -> jax.Array:
        self.state, metrics = self.step(*runs.step_inputs(self.state), self.batch, self.key)
        return metrics.nats


def main(args: argparse.Namespace) -> None:
    names = args.models.split(",")
    for name in names:
        if name not in PAPER:
            raise ConfigError(f"--models={name}: Table 1 has {', '.join(PAPER)}")
    contestants, tokens = {}, {}
    for chosen, bindings in variants(args.implementations):
        bindings = [*args.gin_bindings, *bindings]
        for name in names:
            config, tokens[name] = of_row(name, args, bindings)
            contestants[name, chosen] = Contestant(config)
            print(f"compiled {name}, {chosen}", file=sys.stderr)
    size, flops = product(args.dtype)
    functions = {", ".join(key): one.run for key, one in contestants.items()} | {PRODUCT: size}
    times = interleaved(functions, args.rounds)
    best = flops / statistics.median(times[PRODUCT]) * 1e3
    rows = [
        figures(name, chosen, contestants, times, tokens[name], best)
        for name, chosen in contestants
    ]
    print(f"products at {best / 1e12:.2f} TFLOP/s")
    show("A train step", rows)
    measured = {name: contestants[name, chosen].model for name, chosen in contestants}
    report(args, {"rows": rows, "product_flops": best}, measured)


def of_row(name: str, args: argparse.Namespace, bindings: list[str]) -> tuple[Config, int]:
    """Returns the config of a row of Table 1, and the number of tokens of a step.

    Args:
      name: name of the row.
      args: the flags `size`, `tokens` and `dtype`.
      bindings: additional gin bindings.
    """
    model, lanes, segment = row(name, SIZES[args.size], args.tokens)
    text = [
        f"Training.batch_size = {lanes}", f"Training.segment_length = {segment}",
        "Optimizer.name = 'adafactor'", f"Model.dtype = {args.dtype!r}",
    ]  # fmt: skip
    base = Config(model=model)
    return command_line.read([], [*text, *bindings], base).config, lanes * segment


def product(dtype: str) -> tuple[Any, float]:
    """Returns a program of large products that depend on each other, and its number of FLOPs."""
    size = 1024 if jax.default_backend() == "cpu" else 8192
    x = jax.random.normal(jax.random.key(0), (size, size), dtype) * size**-0.5

    @jax.jit
    def chained(x: jax.Array) -> jax.Array:
        y = x
        for _ in range(CHAINED):
            y = y @ x
        return y

    return partial(chained, x), 2.0 * CHAINED * size**3


def figures(
    name: str, chosen: str, contestants: dict, times: dict[str, list[float]], tokens: int,
    best: float,
) -> dict[str, Any]:  # fmt: skip
    """Returns the row of a model and an implementation for the table."""
    own, one = f"{name}, {chosen}", contestants[name, chosen]
    milliseconds = statistics.median(times[own])
    first = next(other for _, other in contestants)
    pace = 3e3 * tokens * forward_flops_per_token(one.model) / milliseconds
    peak = peak_flops(jax.devices()[0])
    slide = f"{BASELINE}, {chosen}"
    return {
        "kind": own,
        "ms": milliseconds,
        "tokens/s": round(tokens / milliseconds * 1e3),
        "MFU": pace / peak if peak else "-",
        f"of {PRODUCT}": pace / best,
        f"of {first}": ratio(times, own, f"{name}, {first}"),
        f"of {BASELINE}": ratio(times, own, slide) if slide in times else "-",
        "paper": PAPER[name],
        "MiB": one.bytes / 2**20,
    }


if __name__ == "__main__":
    flags = parser(
        __doc__, size=("paper", "or small"), tokens=(131072, "per step"), rounds=5,
        models=(USUAL, f"of {', '.join(PAPER)}"), dtype="bfloat16",
        implementations=("", "OPERATION,...:NAME,..."),
    )  # fmt: skip
    flags.add_argument("--gin_bindings", action="append", default=[], help="of all models")
    command_line.main(main, flags)
