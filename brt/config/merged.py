"""Settings of earlier versions that became a part of another setting.

Saved configs and .gin files may still name these settings. Their values are translated to values of
the settings that replace them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

from brt.config.checks import check
from brt.config.kernels import AUTO, IMPLEMENTATIONS, OPERATIONS


class Merged(NamedTuple):
    """A setting that became a part of another setting.

    Attributes:
      into: the field that replaces the setting, such as "CrossAttention.without".
      type: the type of the setting's values.
      merge: a function of a value of `into` and a value of the setting. It returns the value of
        `into` that has the same meaning as both values together.
    """

    into: str
    type: Any
    merge: Callable[[Any, Any], Any]


def _flag(item: str, meaning: Any, names: tuple[str, ...], value: Any) -> tuple[str, ...]:
    """Returns `names` with the item if the value has this meaning, and without it otherwise."""
    rest = tuple(name for name in names if name != item)
    return (*rest, item) if value == meaning else rest


def _pair(key: str, default: str, pairs: tuple[str, ...], value: str) -> tuple[str, ...]:
    """Returns `pairs` (KEY=VALUE) with this value for the key; the default needs no pair."""
    rest = tuple(pair for pair in pairs if pair.partition("=")[0] != key)
    return rest if value == default else (*rest, f"{key}={value}")


def _memory(kind: str, memory: str) -> str:
    if kind not in ("xl_memory", "transformer_xl"):
        return kind
    return "transformer_xl" if memory == "identity" else "xl_memory"


def _mass_rule(rule: str, constant: bool) -> str:
    if rule not in ("paper", "paper_constant"):
        check(not constant, f"Attention.mass_stop_gradient = True needs 'paper', not {rule!r}")
        return rule
    return "paper_constant" if constant else "paper"


def _tied(logits: str, tied: bool) -> str:
    return logits.replace("own", "tied") if tied else logits.replace("tied", "own")


def _scaled(logits: str, scaled: bool) -> str:
    return logits.removesuffix("_scaled") + "_scaled" * scaled


def _column(section: str, role: str, default: str = "") -> Merged:
    return Merged(f"{section}.columns", str, partial(_pair, role, default))


_WITHOUT, _PADDING = "CrossAttention.without", "CrossAttention.count_padding_in"
MERGED: dict[str, Merged] = {
    **{f"Kernels.{operation}": Merged(
        "Kernels.use", Literal[IMPLEMENTATIONS], partial(_pair, operation, AUTO)
    ) for operation in OPERATIONS},
    "Data.text_field": _column("Data", "text", "text"),
    "Data.id_field": _column("Data", "id"),
    **{f"Pairs.{role}_field": _column("Pairs", role) for role in ("source", "target", "id")},
    **{f"Sentences.{role}_field": _column("Sentences", role) for role in (
        "first", "second", "label", "id",
    )},
    "CrossAttention.use_segment": Merged(_WITHOUT, bool, partial(_flag, "segment", False)),
    "CrossAttention.use_raf": Merged(_WITHOUT, bool, partial(_flag, "raf", False)),
    "CrossAttention.norm": Merged(
        _WITHOUT, Literal["feature", "none"], partial(_flag, "norm", "none")
    ),
    "CrossAttention.kv_source": Merged(
        _WITHOUT, Literal["remaining", "segment"], partial(_flag, "remaining", "segment")
    ),
    "CrossAttention.segment_count": Merged(
        _PADDING, Literal["per_example", "static"], partial(_flag, "segments", "static")
    ),
    "CrossAttention.mask_kv": Merged(_PADDING, bool, partial(_flag, "sums", False)),
    "CrossAttention.memory": Merged("CrossAttention.kind", Literal["rnn", "identity"], _memory),
    "Attention.mass_stop_gradient": Merged("Attention.mass_rule", bool, _mass_rule),
    "Seq2Seq.tied_logits": Merged("Seq2Seq.logits", bool, _tied),
    "Seq2Seq.scale_logits": Merged("Seq2Seq.logits", bool, _scaled),
}  # fmt: skip
