"""Rotary positions of decoders: brt's settings from the entries of config.json, and back.

transformers 5 describes rotary positions in `rope_parameters`, and older versions in `rope_theta`,
`rope_local_base_freq` and `rope_scaling`. brt stores every scaling as divisors of the angles and a
factor of rotated channels.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from brt.config import Model
from brt.errors import CheckpointError
from brt.interop.huggingface.causal.families import Family

LOCAL, GLOBAL = "sliding_attention", "full_attention"
KEYS = {
    "rope_theta", "rope_interleaved", "rope_parameters", "rope_scaling", "rope_local_base_freq",
    "partial_rotary_factor", "rotary_pct", "rotary_emb_base", "no_rope_layers",
    "no_rope_layer_interval", "original_max_position_embeddings",
}  # fmt: skip


class _Context(NamedTuple):
    """What the scaling of angles depends on.

    Attributes:
      base: the base of the angles.
      channels: the number of rotated channels.
      length: the number of tokens of the context with the scaling.
      original: the number of tokens of the context without the scaling.
      window: the number of tokens that a token is to see.
    """

    base: float
    channels: int
    length: int
    original: int
    window: int


class Scaling(NamedTuple):
    # The divisors of the angles: none, one for all pairs of channels, or one for each pair.
    divisors: tuple[float, ...] = ()
    factor: float = 1.0  # Rotated channels are multiplied by this number.


def _angles(c: _Context) -> np.ndarray:
    return c.base ** (-np.arange(0, c.channels, 2) / c.channels)


def _linear(scaling: Mapping[str, Any], c: _Context) -> Scaling:
    return Scaling((float(scaling["factor"]),))


def _llama3(scaling: Mapping[str, Any], c: _Context) -> Scaling:
    # Within the original context, each pair of channels makes a number of turns. The angles of
    # pairs with fewer than `low` turns are divided by the factor, the angles of pairs with more
    # than `high` turns by 1, and all other angles by a number in between.
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    if not 0 < low < high:
        raise CheckpointError(
            f"config.json: low_freq_factor = {low} must be above 0 and below high_freq_factor = "
            f"{high}"
        )
    turns = scaling["original_max_position_embeddings"] * _angles(c) / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return Scaling(_divisors(kept + (1 - kept) / scaling["factor"]))


def _yarn(scaling: Mapping[str, Any], c: _Context) -> Scaling:
    # YaRN (Peng et al. 2023): the angles of the first pairs of channels are divided by 1, those of
    # the last pairs by the factor, and those between them by numbers in between.
    factor = scaling.get("factor") or c.length / c.original

    def pair(turns: float) -> float:
        length = c.original / (turns * 2 * math.pi)
        return c.channels * math.log(length) / (2 * math.log(c.base))

    low = pair(float(scaling.get("beta_fast") or 32))
    high = pair(float(scaling.get("beta_slow") or 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, c.channels - 1)
    ramp = np.clip((np.arange(c.channels // 2) - low) / ((high - low) or 0.001), 0.0, 1.0)
    own, all_channels = (scaling.get(name) for name in ("mscale", "mscale_all_dim"))
    of_attention = scaling.get("attention_factor")
    if of_attention is None:
        weights = (own, all_channels) if own and all_channels else (1.0, 0.0)
        logarithm = 0.1 * math.log(max(factor, 1.0))
        of_attention = (weights[0] * logarithm + 1) / (weights[1] * logarithm + 1)
    return Scaling(_divisors(ramp / factor + (1 - ramp)), float(of_attention))


def _longrope(scaling: Mapping[str, Any], c: _Context) -> Scaling:
    # LongRoPE (Ding et al. 2024) has one list of divisors for short and one for long contexts.
    name = "long_factor" if c.window > c.original else "short_factor"
    divisors, of_attention = scaling[name], scaling.get("attention_factor")
    if len(divisors) != c.channels // 2 or min(divisors) <= 0:
        raise CheckpointError(
            f"config.json: {name} needs {c.channels // 2} positive numbers, not {divisors!r:.60}"
        )
    if of_attention is None:
        factor = scaling.get("factor") or c.length / c.original
        of_attention = math.sqrt(1 + math.log(max(factor, 1.0)) / math.log(c.original))
    return Scaling(tuple(float(x) for x in divisors), float(of_attention))


def _divisors(shares: np.ndarray) -> tuple[float, ...]:
    return tuple((1 / shares).tolist())


_Read = Callable[[Mapping[str, Any], _Context], Scaling]
# The kinds of scaling that brt reads, each with the function that reads it and the keys that it
# needs. 'dynamic' changes angles only in texts longer than the original context, and brt does not
# apply it.
_SCALINGS: dict[str, tuple[_Read, tuple[str, ...]]] = {
    "default": (lambda scaling, c: Scaling(), ()),
    "linear": (_linear, ("factor",)),
    "dynamic": (lambda scaling, c: Scaling(), ()),
    "llama3": (
        _llama3,
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    ),
    "yarn": (_yarn, ("factor",)),
    "longrope": (_longrope, ("short_factor", "long_factor")),
}


def settings(
    keys: Mapping[str, Any], family: Family, *, head_dim: int, layers: int, window: int
) -> dict[str, Any]:
    """Returns those settings of Rotary that depend on several keys of config.json. `keys` has the
    entries of config.json, with the defaults of missing keys.
    """
    parameters, scaling = keys.get("rope_parameters", {}), keys.get("rope_scaling", {})
    local = parameters.get(LOCAL, {})
    parameters = parameters.get(GLOBAL, parameters)
    if parameters.get("rope_type", "default") != "default":
        scaling = parameters
    if keys.get("rope_interleaved"):
        raise CheckpointError("config.json: rope_interleaved = true is not supported")
    bases = parameters.get("rope_theta"), keys.get("rope_theta"), keys.get("rotary_emb_base")
    base = next((x for x in bases if x), 10_000.0)
    channels = _channels(keys, parameters, family, head_dim)
    length = keys[family.all_fields()["Rotary.context"]]
    original = scaling.get("original_max_position_embeddings") or keys.get(
        "original_max_position_embeddings", length
    )
    context = _Context(base, channels, length, original, window)
    found = _scaling(scaling, family, context)
    local_base = local.get("rope_theta", keys.get("rope_local_base_freq", base))
    own = family.rope_by_layer and (local_base != base or found != Scaling())
    return {
        "Rotary.base": float(base), "Rotary.local_base": float(local_base) if own else 0.0,
        "Rotary.channels": 0 if channels == head_dim else channels,
        "Rotary.divisors": found.divisors, "Rotary.attention_factor": found.factor,
        "Rotary.skipped": _skipped(keys, family, layers),
    }  # fmt: skip


def notes(keys: Mapping[str, Any]) -> list[str]:
    """Returns notes about scalings in config.json that depend on the length of a text. In brt,
    angles and divisors do not change while a text grows.
    """
    parameters, scaling = keys.get("rope_parameters") or {}, keys.get("rope_scaling") or {}
    parameters = parameters.get(GLOBAL, parameters)
    named = scaling.get("rope_type", scaling.get("type", "default"))
    kind = parameters.get("rope_type", named)
    if kind == "dynamic":
        return ["rotary positions are not scaled; transformers scales them beyond the context"]
    if kind in ("longrope", "su"):
        return [
            "the divisors of LongRoPE are those for a window of this length; for a window beyond "
            "or within the original context, convert the directory again with --window"
        ]
    return []


def _channels(
    keys: Mapping[str, Any], parameters: Mapping[str, Any], family: Family, head_dim: int
) -> int:
    usual = keys.get("partial_rotary_factor", keys.get("rotary_pct", 1.0))
    part = parameters.get("partial_rotary_factor", usual)
    channels = int(head_dim * part)
    if part != 1 and "partial_rotary_factor" not in family.keys:
        raise CheckpointError(
            f"config.json: partial_rotary_factor = {part} asks for rotary positions in a part of "
            f"each head, which a {family.name} does not have"
        )
    if not 0 < channels <= head_dim or channels % 2:
        raise CheckpointError(
            f"config.json: partial_rotary_factor = {part} rotates {channels} of {head_dim} "
            "channels; an even number of channels, at most all, can be rotated"
        )
    return channels


def _scaling(scaling: Mapping[str, Any], family: Family, context: _Context) -> Scaling:
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    kind = family.scalings.get(kind, kind)
    if kind not in _SCALINGS:
        raise CheckpointError(
            f"config.json: the rope scaling {kind!r:.40} is not supported; "
            f"{', '.join(map(repr, _SCALINGS))} are; if the weights were trained without it, "
            "remove rope_scaling"
        )
    read, needed = _SCALINGS[kind]
    for name in needed:
        if name not in scaling:
            raise CheckpointError(f"config.json: the rope scaling {kind!r} lacks {name!r}")
    for name in ("factor", "original_max_position_embeddings", "attention_factor"):
        if scaling.get(name, 1) <= 0:
            raise CheckpointError(f"config.json: {name} = {scaling[name]} must be above 0")
    try:
        return read(scaling, context)
    except (ArithmeticError, ValueError) as error:  # Numbers without a logarithm or quotient.
        raise CheckpointError(
            f"config.json: the rope scaling {kind!r} cannot be computed from a base of "
            f"{context.base}, contexts of {context.original} and {context.length} tokens and "
            f"{scaling!r:.120}"
        ) from error


def _skipped(keys: Mapping[str, Any], family: Family, layers: int) -> tuple[bool, ...]:
    if "no_rope_layers" not in family.keys:
        return ()
    every = keys["no_rope_layer_interval"]
    if every < 1:
        raise CheckpointError(f"config.json: no_rope_layer_interval = {every} must be above 0")
    # The key's name says the opposite: layers whose entry is 1 have rotary positions.
    rotates = keys.get("no_rope_layers") or [(i + 1) % every != 0 for i in range(layers)]
    if len(rotates) != layers:
        raise CheckpointError(
            f"config.json: no_rope_layers has {len(rotates)} entries, not {layers}"
        )
    return () if all(rotates) else tuple(not x for x in rotates)


def can_state(model: Model, family: Family) -> bool:
    """Returns True if config.json of a family can say how a model rotates queries and keys."""
    rotary = model.rotary
    return (
        (not rotary.channels or "partial_rotary_factor" in family.keys)
        and (not any(rotary.skipped) or "no_rope_layers" in family.keys)
        and (not rotary.local_base or family.rope_by_layer)
        and (not rotary.divisors or "longrope" not in family.scalings.values() or _is_full(model))
    )


def _is_full(model: Model) -> bool:
    # Returns True if there is a divisor for each pair, as in LongRoPE, the only scaling of Phi-3.
    return len(model.rotary.divisors) == (model.rotary.channels or model.head_dim) // 2


def to_theirs(model: Model, family: Family) -> dict[str, Any]:
    """Returns the entries of config.json that describe rotary positions."""
    r, context = model.rotary, model.rotary.context or model.window
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": r.base}
    if len(r.divisors) == 1 and r.attention_factor == 1:
        parameters |= {"rope_type": "linear", "factor": r.divisors[0]}
    elif r.divisors or r.attention_factor != 1:
        pairs = (r.channels or model.head_dim) // 2
        divisors = list(r.divisors if len(r.divisors) == pairs else (r.divisors or (1.0,)) * pairs)
        parameters |= {
            "rope_type": "longrope", "short_factor": divisors, "long_factor": divisors,
            "attention_factor": r.attention_factor, "original_max_position_embeddings": context,
        }  # fmt: skip
    if "partial_rotary_factor" in family.keys:
        part = (r.channels or model.head_dim) / model.head_dim
        parameters["partial_rotary_factor"] = part
    more: dict[str, Any] = {}
    if "no_rope_layers" in family.keys:
        count = len(r.skipped) or 1
        more["no_rope_layers"] = [
            int(not (r.skipped and r.skipped[i % count])) for i in range(model.layers)
        ]
    if not family.rope_by_layer:
        return {"rope_parameters": parameters, **more}
    local = {"rope_type": "default", "rope_theta": r.local_base or r.base}
    return {"rope_parameters": {GLOBAL: parameters, LOCAL: local}, **more}
