"""Window attention with functions of torch, for `attention.py` if torch is installed."""

import importlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from attention_kinds import GRADIENTS, Contestant, Inputs, Sizes
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

UNSEEN = -1e9  # logit of a key that a query must not see
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
Function = Callable[..., Tensor]


class Pending:
    """A value with which `jax.block_until_ready` waits for the work of torch."""

    def block_until_ready(self) -> None:
        if GPU:
            torch.cuda.synchronize()


def device() -> str:
    return f"torch {torch.__version__}, {torch.cuda.get_device_name() if GPU else 'cpu'}"


def contestants(given: list[Inputs], sizes: Sizes) -> Iterator[tuple[str, Contestant | str]]:
    """Yields name and contestant, or the reason why a contestant cannot run on this machine."""
    arrays = [[_tensor(name, x, sizes) for name, x in one._asdict().items()] for one in given]
    yield "torch sdpa", _contestant(blocked, arrays, True)
    for name, biased in (("torch flex", True), ("flex, no bias", False)):
        if GPU:
            yield name, _contestant(flexible(sizes, biased), arrays, biased)
        else:
            yield name, "has gradients on GPUs alone"
    try:
        yield "flash_attn, no bias", _contestant(flash(sizes), arrays, False)
    except ImportError as error:
        yield "flash_attn, no bias", str(error)


def _tensor(name: str, x: np.ndarray, sizes: Sizes) -> Tensor:
    """Converts an array to a tensor; queries, keys and values become [B, H, T, K], as in torch."""
    if name == "bias":
        return torch.tensor(x, device=DEVICE, requires_grad=True)
    made = torch.tensor(x, device=DEVICE, dtype=getattr(torch, sizes.dtype))
    return made.transpose(1, 2).contiguous().requires_grad_(name in GRADIENTS)


def _contestant(function: Function, arrays: list[list], biased: bool) -> Contestant:
    names = GRADIENTS if biased else GRADIENTS[:-1]

    def gradients(x: list[Tensor], gradient: Tensor) -> tuple[Tensor, ...]:
        output = function(*x)
        return output, *torch.autograd.grad(output, x[2 : 2 + len(names)], gradient)

    turns = itertools.cycle(arrays)

    def forward() -> Any:
        with torch.no_grad():
            function(*next(turns)[:-1])
        return Pending()

    def both() -> Any:
        *x, gradient = next(turns)
        gradients(x, gradient)
        return Pending()

    def results(gradient: np.ndarray) -> dict[str, np.ndarray]:
        *x, last = arrays[0]
        given = torch.tensor(gradient, device=DEVICE, dtype=last.dtype).transpose(1, 2)
        found = dict(zip(("output", *names), gradients(x, given.contiguous()), strict=True))
        numbers = {name: y.detach().float().cpu() for name, y in found.items()}
        return {
            name: (y if name == "bias" else y.transpose(1, 2)).numpy()
            for name, y in numbers.items()
        }

    both().block_until_ready()
    if GPU:
        torch.cuda.reset_peak_memory_stats()
        both().block_until_ready()
    return Contestant(
        forward, both, results, torch.cuda.max_memory_allocated() if GPU else None, biased
    )


def blocked(
    cached_k: Tensor, cached_v: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor
) -> Tensor:
    """Computes window attention with scaled_dot_product_attention, which knows no windows.

    Each block is a separate row of the batch. It attends to itself and to the previous block, and
    a mask hides the half of the keys that are outside of the window.
    """
    lanes, heads, tokens, width = q.shape
    window = bias.shape[1]
    blocks = tokens // window

    def pairs(*joined: Tensor) -> Tensor:
        of_blocks = torch.cat(joined, 2).unfold(2, 2 * window, window).permute(0, 2, 1, 4, 3)
        return of_blocks.reshape(-1, heads, 2 * window, width)

    rows, columns = torch.arange(window, device=DEVICE), torch.arange(2 * window, device=DEVICE)
    distance = rows[:, None] + window - columns
    # Row r and slot c have the distance (r - c) modulo the window, so each row of the bias is the
    # previous one, shifted by one.
    repeated = bias.roll(-1, 1).repeat(1, window + 1).reshape(heads, window, window + 1)
    tile = repeated[:, :, :window].flip(2).repeat(1, 1, 2)
    seen = (distance >= 0) & (distance < window)
    tile = torch.where(seen, tile, UNSEEN)[None].to(q.dtype)
    own = q.reshape(lanes, heads, blocks, window, width).transpose(1, 2).flatten(0, 1)
    keys, values = pairs(cached_k, k), pairs(cached_v, v)
    y = scaled_dot_product_attention(own, keys, values, attn_mask=tile, scale=1.0)
    return y.unflatten(0, (lanes, blocks)).transpose(1, 2).reshape(q.shape)


def flash(sizes: Sizes) -> Function:
    """Returns window attention by FlashAttention, which has neither the bias nor a cached block."""
    attend = importlib.import_module("flash_attn").flash_attn_func

    def attention(_: Tensor, __: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        by_token = (x.transpose(1, 2) for x in (q, k, v))
        y = attend(*by_token, softmax_scale=1.0, causal=True, window_size=(sizes.window - 1, 0))
        return y.transpose(1, 2)

    return attention


def flexible(sizes: Sizes, biased: bool) -> Function:
    """Returns window attention by flex_attention, with a mask of blocks.

    Args:
      sizes: sizes of the arrays.
      biased: False to leave out the bias and the cached block.
    """
    window, cached = sizes.window, sizes.window if biased else 0

    def seen(b: Any, h: Any, row: Any, column: Any) -> Any:
        distance = row + cached - column
        return (distance >= 0) & (distance < window)

    lengths = sizes.tokens, cached + sizes.tokens
    mask = create_block_mask(seen, None, None, *lengths, device=DEVICE)
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(
        cached_k: Tensor, cached_v: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor
    ) -> Tensor:
        def with_bias(score: Any, b: Any, h: Any, row: Any, column: Any) -> Any:
            return score + bias[h, (row - column) % window]

        if biased:
            k, v = torch.cat([cached_k, k], 2), torch.cat([cached_v, v], 2)
        return compiled(
            q, k, v, score_mod=with_bias if biased else None, block_mask=mask, scale=1.0
        )

    return attend
