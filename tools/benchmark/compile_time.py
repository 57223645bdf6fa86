"""Measures the seconds for lowering and compiling a training step of T5 with 2 + 2 and more layers.

    python tools/benchmark/compile_time.py [--layers=2,12] [--rounds=3] [--model_dim=768]
        [--source=512] [--target=128] [--json=FILE]

The step is the forward and backward pass of the loss of one pair, with the sizes of T5-base except
for a small vocabulary. The depths take turns, and caches are cleared before each compilation.
Ratios to the first depth are medians over the rounds.
"""

import argparse
import os
import statistics
import time
from typing import Any

from conditions import report
from flags import parser

os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

import flax.linen as nn
import jax
from long_summaries import loss, random_pair
from timing import ratio, show

from brt import tasks
from brt.config import Config, Pairs, Seq2Seq, Training


def main() -> None:
    args = parser(
        __doc__, layers=([2, 12], "of the encoder, and of the decoder"), rounds=3, model_dim=768,
        source=(512, "tokens"), target=(128, "tokens"),
    ).parse_args()  # fmt: skip
    names = {layers: f"{layers} + {layers}" for layers in args.layers}
    lower, both = ({name: [] for name in names.values()} for _ in range(2))
    programs = {}
    for _ in range(args.rounds):
        for layers, name in names.items():
            jax.clear_caches()
            begin = time.perf_counter()
            lowered = lowered_step(args, layers)
            lower[name].append(time.perf_counter() - begin)
            compiled = lowered.compile()
            both[name].append(time.perf_counter() - begin)
            programs[name] = compiled.as_text().count(" = ")
    first = names[args.layers[0]]
    rows = [
        {
            "kind": name, "lower s": statistics.median(lower[name]),
            "and compile s": statistics.median(both[name]),
            f"of {first}": ratio(both, name, first), "instructions": programs[name],
        }
        for name in names.values()
    ]  # fmt: skip
    show("A training step", rows)
    report(args, rows)


def lowered_step(args: argparse.Namespace, layers: int) -> Any:
    """Lowers the gradient of the loss of a model with abstract parameters."""
    model = Seq2Seq(
        encoder_layers=layers, decoder_layers=layers, model_dim=args.model_dim,
        heads=args.model_dim // 64, mlp_dim=4 * args.model_dim, vocab_size=8000,
    )  # fmt: skip
    config = Config(
        seq2seq=model,
        pairs=Pairs(max_source_length=args.source, max_target_length=args.target),
        training=Training(task="summarization"),
    )
    key = jax.random.key(0)
    params = jax.eval_shape(
        lambda: nn.meta.unbox(tasks.from_config(config).initial_params(config, key))
    )
    batch = random_pair(args.source, args.target)
    return jax.jit(jax.grad(lambda p, b, k: loss(config, p, b, k))).lower(params, batch, key)


if __name__ == "__main__":
    main()
