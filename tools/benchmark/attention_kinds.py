"""Sizes, inputs, and the exact result of window attention, for all frameworks of `attention.py`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp  # NumPy itself has no bfloat16.
import numpy as np

# As in training, there are no gradients of the cached block.
GRADIENTS = ("queries", "keys", "values", "bias")
# Number of products over all pairs of a query and a key of its window that attention needs at
# least.
PRODUCTS = {"forward": 2, "both": 6}


class Sizes(NamedTuple):
    """Sizes and dtype of the arrays that attention is measured with."""

    lanes: int
    tokens: int
    window: int
    heads: int
    head_dim: int
    dtype: str

    def flops(self, what: str) -> float:
        """Returns the FLOPs of the products of all queries and the keys that they see.

        Products that an implementation computes with masked keys, or for a second time, do not
        count.

        Args:
          what: "forward", or "both" for the forward and backward pass.
        """
        pairs = self.lanes * self.heads * self.tokens * self.window
        return 2.0 * PRODUCTS[what] * pairs * self.head_dim


class Inputs(NamedTuple):
    """Float32 inputs whose values the dtype of the computation represents exactly.

    Attributes:
      cached_keys, cached_values: [B, W, H, K], keys and values of the block before the segment.
      queries, keys, values: [B, T, H, K]; the queries are already scaled.
      bias: [H, W], added to the logits of each head, by the distance of query and key.
      gradient: [B, T, H, K], gradient of the output.
    """

    cached_keys: np.ndarray
    cached_values: np.ndarray
    queries: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    bias: np.ndarray
    gradient: np.ndarray


class Contestant(NamedTuple):
    """An implementation of window attention, with its inputs.

    Attributes:
      forward: computes the output, for the next one of several inputs in turn; returns a value
        that `jax.block_until_ready` can wait for.
      both: as `forward`, but computes the gradients, too.
      results: maps a gradient of the output to the output and the gradients, by name.
      memory: peak number of bytes on the device, with gradients; None if unknown.
      biased: True if the implementation has the bias and the cached block. Otherwise it computes
        less, so its time is only a lower bound for the others.
    """

    forward: Callable[[], Any]
    both: Callable[[], Any]
    results: Callable[[np.ndarray], dict[str, np.ndarray]]
    memory: int | None
    biased: bool = True


def inputs(sizes: Sizes, seed: int = 0) -> Inputs:
    """Returns normal random inputs. Lanes repeat, because it takes long to draw many numbers."""
    draw = np.random.default_rng(seed)
    lanes, tokens, window, heads, width, dtype = sizes
    drawn = min(lanes, 2)

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        x = draw.standard_normal(shape, np.float32) * np.float32(scale)
        return x.astype(jnp.dtype(dtype)).astype(np.float32)

    def repeated(x: np.ndarray) -> np.ndarray:
        return np.resize(x, (lanes, *x.shape[1:]))

    cached, own = (drawn, window, heads, width), (drawn, tokens, heads, width)
    return Inputs(
        repeated(normal(*cached)), repeated(normal(*cached)),
        repeated(normal(*own, scale=width**-0.5)), repeated(normal(*own)),
        repeated(normal(*own)), normal(heads, window), repeated(normal(*own)),
    )  # fmt: skip


def first_lane(gradient: np.ndarray) -> np.ndarray:
    """Sets the gradient to 0 in all lanes except the first."""
    only = np.zeros_like(gradient)
    only[0] = gradient[0]
    return only


def exact(given: Inputs, biased: bool = True) -> dict[str, np.ndarray]:
    """Computes output and gradients of the first lane in float64, block by block.

    Args:
      given: inputs of all lanes.
      biased: False to leave out the bias and the cached block.
    """
    before_k, before_v, q, k, v, bias, g = (
        (x if x is given.bias else x[0].swapaxes(0, 1)).astype(np.float64) for x in given
    )  # [H, T, K], because matrix products of single heads are faster than sums by np.einsum
    k, v = np.concatenate([before_k, k], axis=1), np.concatenate([before_v, v], axis=1)
    bias, window = bias * biased, bias.shape[1]
    distance = np.arange(window)[:, None] + window - np.arange(2 * window)
    output, d_q, d_k, d_v = (np.zeros_like(x) for x in (q, q, k, v))
    d_bias = np.zeros_like(bias)
    for begin in range(0, q.shape[1], window):
        rows, columns = np.s_[:, begin : begin + window], np.s_[:, begin : begin + 2 * window]
        seen = (distance >= 0) & (distance < window)
        if not (begin or biased):
            seen &= np.arange(2 * window) >= window
        logits = q[rows] @ k[columns].swapaxes(1, 2)
        logits += bias[:, np.clip(distance, 0, window - 1)]
        weights = np.where(seen, np.exp(logits - logits.max(where=seen, axis=-1, keepdims=True,
                                                            initial=-np.inf)), 0.0)  # fmt: skip
        weights /= weights.sum(axis=-1, keepdims=True)
        output[rows] = weights @ v[columns]
        d_v[columns] += weights.swapaxes(1, 2) @ g[rows]
        d_logits = g[rows] @ v[columns].swapaxes(1, 2)
        d_logits = weights * (d_logits - (weights * d_logits).sum(axis=-1, keepdims=True))
        d_q[rows] = d_logits @ k[columns]
        d_k[columns] += d_logits.swapaxes(1, 2) @ q[rows]
        for own, of_head in zip(d_bias, d_logits, strict=True):
            own += np.bincount(distance[seen], of_head[seen], minlength=window)
    of_tokens = (output, d_q, d_k[:, window:], d_v[:, window:])
    names = ("output", *GRADIENTS[:-1])
    found = {name: x.swapaxes(0, 1) for name, x in zip(names, of_tokens, strict=True)}
    return found | ({"bias": d_bias} if biased else {})


def error(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """Returns the largest error of the first lane, relative to the largest value of its array."""
    worst = 0.0
    for name, x in found.items():
        own = x if name == "bias" else x[0]
        difference = np.abs(own.astype(np.float64) - expected[name]).max()
        worst = max(worst, float(difference / np.abs(expected[name]).max()))
    return worst


def deterministic(contestant: Contestant, gradient: np.ndarray, times: int = 3) -> bool:
    """Returns True if output and gradients are equal bit by bit in repeated calls."""
    first = contestant.results(gradient)
    again = (contestant.results(gradient) for _ in range(times - 1))
    return all(np.array_equal(first[name], x) for one in again for name, x in one.items())
