"""Window attention with the implementations of brt and of jax.nn, for `attention.py`."""

import importlib
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from attention_kinds import GRADIENTS, Contestant, Inputs, Sizes

from brt.ops.window_attention import window_part
from brt.ops.window_attention.api import OP
from brt.ops.window_attention.xla import circulant

UNSEEN = -1e9  # logit of a key that a query must not see
Array = jax.Array
Pair = tuple[jax.Array, jax.Array]  # keys and values of the cached block
FOR_TESTS = ("reference", "interpret")


def device() -> str:
    return f"jax {jax.__version__}, {jax.devices()[0].device_kind}"


def contestants(given: list[Inputs], sizes: Sizes) -> Iterator[tuple[str, Contestant | str]]:
    """Yields name and contestant, or the reason why a contestant cannot run on this machine."""
    arrays = [
        tuple(jnp.asarray(x, jnp.float32 if x is one.bias else sizes.dtype) for x in one)
        for one in given
    ]
    plain = partial(jax.nn.dot_product_attention, scale=1.0, implementation="xla")
    functions: dict[str, tuple[Callable, bool]] = {
        f"brt {one.name}": (partial(_own, implementation=one.name), True)
        for one in OP.implementations
        if not one.name.endswith(FOR_TESTS)
    }
    functions |= {
        "jax.nn xla": (partial(blocked, plain), True),
        "jax.nn cudnn": (partial(blocked, _cudnn), True),
        "cudnn, no bias": (partial(windowed, _cudnn), False),
    }
    if importlib.util.find_spec("tokamax"):
        tokamax = importlib.import_module("tokamax").dot_product_attention
        functions["tokamax, no bias"] = (partial(windowed, partial(tokamax, scale=1.0)), False)
    else:
        yield "tokamax, no bias", "is not installed"
    for name, (function, biased) in functions.items():
        if "cudnn" in name and jax.default_backend() != "gpu":
            yield name, f"runs on gpu, not on {jax.default_backend()}"
            continue
        try:
            yield name, _contestant(function, arrays, biased)
        except NotImplementedError as error:
            yield name, str(error).split(";")[0]


def _contestant(function: Callable, arrays: list[tuple], biased: bool) -> Contestant:
    names = GRADIENTS if biased else GRADIENTS[:-1]

    def with_gradients(*x: jax.Array) -> dict[str, jax.Array]:
        output, pull = jax.vjp(partial(function, x[:2]), *x[2:-1])
        return {"output": output, **dict(zip(names, pull(x[-1]), strict=False))}

    def without(*x: jax.Array) -> jax.Array:
        return function(x[:2], *x[2:-1])

    forward, both = (jax.jit(f).lower(*arrays[0]).compile() for f in (without, with_gradients))
    turns = itertools.cycle(arrays)

    def results(gradient: np.ndarray) -> dict[str, np.ndarray]:
        *x, last = arrays[0]
        found = both(*x, jnp.asarray(gradient, last.dtype))
        return {name: np.asarray(array.astype(jnp.float32)) for name, array in found.items()}

    memory = both.memory_analysis()
    sizes = (memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes)
    return Contestant(
        lambda: forward(*next(turns)), lambda: both(*next(turns)), results, sum(sizes), biased
    )


def _cudnn(*x: jax.Array, bias: jax.Array | None = None, **options: tuple[int, int]) -> jax.Array:
    bias = None if bias is None else bias.astype(x[0].dtype)
    return jax.nn.dot_product_attention(*x, bias, scale=1.0, implementation="cudnn", **options)


def _own(cached: Pair, q: Array, k: Array, v: Array, bias: Array, **options: str) -> Array:
    cache_mask = jnp.ones((q.shape[0], q.shape[1] // bias.shape[1]), bool)
    return window_part(q, cached, k, v, bias, cache_mask, **options).output


def blocked(attend: Callable, cached: Pair, q: Array, k: Array, v: Array, bias: Array) -> Array:
    """Computes window attention with a function that knows no windows.

    Each block is a separate row of the batch. It attends to itself and to the previous block, and
    a mask hides the half of the keys that are outside of the window.

    Args:
      attend: attention of queries, keys and values with a bias that is added to the logits.
      cached: keys and values of the block before the segment.
      q, k, v: queries, keys and values of the segment.
      bias: [H, W], bias of the logits by distance.
    """
    lanes, _, *heads = q.shape
    window = bias.shape[1]

    def pairs(before: Array, x: Array) -> Array:
        own = x.reshape(lanes, -1, window, *heads)
        others = jnp.concatenate([before[:, None], own[:, :-1]], axis=1)
        return jnp.concatenate([others, own], axis=2).reshape(-1, 2 * window, *heads)

    distance = np.arange(window)[:, None] + window - np.arange(2 * window)
    tile = jnp.tile(circulant(bias, window), (1, 1, 2))
    tile = jnp.where((distance >= 0) & (distance < window), tile, UNSEEN)[None]
    keys, values = (pairs(before, x) for before, x in zip(cached, (k, v), strict=True))
    return attend(q.reshape(-1, window, *heads), keys, values, bias=tile).reshape(q.shape)


def windowed(attend: Callable, cached: Pair, q: Array, k: Array, v: Array, bias: Array) -> Array:
    """Computes window attention with a kernel that supports neither the bias nor a cached block.

    Its time is a lower bound for implementations that do.
    """
    return attend(q, k, v, local_window_size=(bias.shape[1] - 1, 0))
