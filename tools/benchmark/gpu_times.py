"""Measures the attention of encoders and of recurrent states on a GPU, with kernels and with XLA.

    python tools/benchmark/gpu_times.py [--lanes=16] [--rounds=10] [--json=FILE]

The cases are the attention of an encoder with T5's bias and padding, and that of tokens to
recurrent states, in bfloat16. Each is computed by brt's kernel, by plain XLA, and by cuDNN
through `jax.nn.dot_product_attention`. A row gives the milliseconds of the forward pass, and of the
forward and backward pass with the gradients of all inputs. The implementations take turns; times
are medians over the rounds, and a ratio is the median of the ratios within a round. An
implementation that cannot run is listed with the reason.
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from conditions import report
from flags import parser
from timing import interleaved, ratio, show

from brt import command_line
from brt.ops.masked_attention import attend as masked_attend
from brt.ops.softmax_attention import attend

KERNEL, XLA, CUDNN = "pallas_gpu", "xla", "cudnn"
HEADS = 8
REPEATS = 10  # calls that are timed together
Inputs = dict[str, jax.Array]
# Computes attention from its inputs and the name of an implementation.
Attention = Callable[[Inputs, str], jax.Array]


def main(args: argparse.Namespace) -> None:
    device = jax.devices()[0]
    if device.platform != "gpu":
        sys.exit(f"the kernels run on GPUs, and JAX found {device.device_kind}")
    cases = {
        "tokens to 512 states, 8 blocks of 512 tokens, heads of 128": states(args.lanes),
        "encoder, 1,024 tokens, heads of 64, T5's bias": encoder(args.lanes, 1024),
        "encoder, 4,096 tokens, heads of 64, T5's bias": encoder(max(args.lanes // 8, 1), 4096),
    }
    found = {}
    for name, (attention, inputs) in cases.items():
        found[name] = measured(attention, inputs, args.rounds)
        show(name, found[name])
        sys.stdout.flush()
    report(args, found)


def states(lanes: int) -> tuple[Attention, Inputs]:
    """Returns the attention of tokens to the states of their block, and its inputs."""
    blocks, size, width = 8, 512, 128
    rng = np.random.default_rng(0)
    keys = lanes, blocks, size, HEADS, width
    inputs = {
        "queries": _normal(rng, (lanes, blocks * size, HEADS, width), width**-0.5),
        "keys": _normal(rng, keys),
        "values": _normal(rng, keys),
    }

    def attention(given: Inputs, implementation: str) -> jax.Array:
        if implementation != CUDNN:
            return attend(**given, implementation=implementation)
        by_block = jax.tree.map(lambda x: x.reshape(-1, size, HEADS, width), given)
        return _cudnn(by_block)

    return attention, inputs


def encoder(lanes: int, tokens: int) -> tuple[Attention, Inputs]:
    """Returns the attention of an encoder whose rows end with padding, and its inputs."""
    width, rng = 64, np.random.default_rng(0)
    shape = lanes, tokens, HEADS, width
    inputs = {
        "queries": _normal(rng, shape, width**-0.5),
        "keys": _normal(rng, shape),
        "values": _normal(rng, shape),
        "bias": _normal(rng, (HEADS, tokens, tokens), dtype="float32"),
    }
    lengths = np.linspace(tokens / 2, tokens, lanes)[:, None, None]
    mask = jnp.asarray(np.arange(tokens) < lengths)  # [B, 1, T]

    def attention(given: Inputs, implementation: str) -> jax.Array:
        if implementation != CUDNN:
            return masked_attend(**given, mask=mask, implementation=implementation)
        bias = given["bias"][None].astype(given["keys"].dtype)
        return _cudnn(given, bias=bias, mask=mask[:, None])

    return attention, inputs


def _cudnn(given: Inputs, **others: jax.Array) -> jax.Array:
    """Returns the attention of queries to keys by cuDNN; the queries are already scaled."""
    arrays = (given[name] for name in ("queries", "keys", "values"))
    return jax.nn.dot_product_attention(*arrays, **others, scale=1.0, implementation=CUDNN)


def _normal(
    rng: np.random.Generator, shape: tuple[int, ...], scale: float = 1.0, dtype: str = "bfloat16"
) -> jax.Array:
    return jnp.asarray(scale * rng.standard_normal(shape, np.float32), dtype)


def measured(attention: Attention, inputs: Inputs, rounds: int) -> list[dict[str, Any]]:
    """Returns a row for each implementation of a case."""
    forward, both = {}, {}
    for name in (KERNEL, XLA, CUDNN):
        try:
            forward[name], both[name] = _programs(attention, inputs, name)
        except Exception as error:  # Whatever a library raises, it cannot run this case.
            print(f"{name} cannot run: {str(error).splitlines()[0]}", file=sys.stderr)
    times = [interleaved(programs, rounds, REPEATS) for programs in (forward, both)]
    return [
        {"implementation": name}
        | {
            f"{what} {unit}": value
            for what, own in zip(("forward", "both"), times, strict=True)
            for unit, value in (
                ("ms", float(np.median(own[name]))), ("of the kernel", ratio(own, name, KERNEL)),
            )
        }
        for name in forward
    ]  # fmt: skip


def _programs(
    attention: Attention, inputs: Inputs, name: str
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Returns the forward pass, and the forward and backward pass, after a first call of each."""

    def loss(given: Inputs) -> jax.Array:
        return jnp.sum(jnp.square(attention(given, name).astype(jnp.float32)))

    forward = jax.jit(lambda given: attention(given, name))
    both = jax.jit(jax.grad(loss))
    jax.block_until_ready((forward(inputs), both(inputs)))
    return (lambda: forward(inputs)), (lambda: both(inputs))


if __name__ == "__main__":
    command_line.main(main, parser(__doc__, lanes=16, rounds=10))
