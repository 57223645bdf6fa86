"""Segmented recurrent attention (SRformer, section 3).

A target position attends to one segment of the source by softmax, and to all other segments
by linear attention, whose states pass through accumulate-and-fire neurons:

    O[t] = softmax(Q[t] K_i^T) V_i + Q[t] R_i / norm(K),  i the segment of t
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brt.config import CrossAttention
from brt.ops import dispatch
from brt.ops.dispatch import Implementation, Op
from brt.ops.dropout import Dropout
from brt.ops.segmented_recurrent_attention import cache, pallas_tpu, reference, xla
from brt.ops.segmented_recurrent_attention.cache import Cache as Cache
from brt.ops.segmented_recurrent_attention.recurrence import Aux as Aux
from brt.ops.segmented_recurrent_attention.recurrence import Parameters as Parameters
from brt.ops.segmented_recurrent_attention.windows import Shared as Shared
from brt.ops.segmented_recurrent_attention.windows import Windows as Windows


def _kernel_refuses(
    queries: Array, windows: Windows, parameters: Parameters, config: CrossAttention, **__: Any
) -> str | None:
    segments, _, heads, _, width = windows.keys.shape
    return pallas_tpu.refuses(config, heads, width, segments, windows.keys.dtype)


OP = Op(
    "segmented_recurrent_attention",
    (
        Implementation(
            "pallas_tpu", partial(xla.attend, recur=pallas_tpu.recurrence),
            ("tpu",), ("tpu",), _kernel_refuses,
        ),
        Implementation("xla", xla.attend),
        Implementation(
            "pallas_interpret", partial(xla.attend, recur=pallas_tpu.interpreted), (),
            refusal=lambda _, windows, parameters, config, **__: pallas_tpu.has_no_such(config),
        ),
        Implementation("reference", reference.attend, auto=(), refusal=dispatch.dropout_refusal),
    ),
)  # fmt: skip


def attend(
    queries: Float[Array, "B T H K"],
    windows: Windows,
    parameters: Parameters,
    config: CrossAttention,
    *,
    t0: int | Int[Array, ""] = 0,
    target_length: int | None = None,
    dropout: Dropout | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T H K"], Aux]:
    """Target positions t0 to t0 + T of every source.

    Args:
      queries: with any scale folded in.
      t0: an array computes the dense form, as then no slots can be planned.
      target_length: that of the batch, for `index_mode = "batch"`; None: as in decoding.
      dropout: of the softmax weights.
      implementation: a named one runs or raises; None takes the best that can.

    Returns:
      The output, in the dtype of the keys, and what to log.

    Raises:
      NotImplementedError: an implementation that does not exist, or not for these inputs.
    """
    return dispatch.run(
        OP, implementation, queries, windows, parameters, config,
        t0=t0, target_length=target_length, dropout=dropout,
    )  # fmt: skip


def prefill(windows: Windows, parameters: Parameters, config: CrossAttention) -> Cache:
    """What `step` reads, made once for each source.

    `config.cache` names the form; "auto" takes the table of all states where that is no
    larger than keys and values (S >= K / 2), else carries the neurons.
    """
    return cache.prefill(windows, parameters, config)


def advance(cache_: Cache, t: int | Int[Array, ""], config: CrossAttention) -> Cache:
    """The cache, with carried neurons taken on to target position t, which never decreases.

    `step` does that by itself but keeps nothing of it: without `advance`, each step with
    `carry` begins where the cache stands. A cache with a table comes back as it is.
    """
    return cache.advance(cache_, jnp.asarray(t, jnp.int32), config)


def step(
    queries: Float[Array, "B N T H K"],
    cache_: Cache,
    t: int | Int[Array, ""],
    config: CrossAttention,
) -> Float[Array, "B N T H K"]:
    """Target positions t to t + T of N beams, which share the cache of their source.

    The same as `attend` at t0 = t (with `index_mode = "batch"`: without a target length).
    """
    return cache.step(queries, cache_, jnp.asarray(t, jnp.int32), config)
