"""Settings that earlier versions had, so that the configs of their runs can still be read."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from brt.config.names import class_field_types


class Removed(NamedTuple):
    """A setting of earlier versions that no longer exists.

    Attributes:
      value: brt now always behaves as if the setting had this value, so saved configs with the
        value are accepted. None if brt accepts saved configs with any value.
      now: the end of an error or a warning, which says how brt behaves instead.
      ignored: True if other values are accepted but have no effect; False if they are refused.
    """

    value: Any
    now: str
    ignored: bool = False


_SHUFFLED = Removed(True, "training data are shuffled in every epoch")
REMOVED = {
    **{f"{section}.shuffle": _SHUFFLED for section in (
        "Data", "Pairs", "Speech", "Sentences", "Questions",
    )},
    "Optimizer.momentum": Removed(0.9, "the momentum of Adafactor is 0.9"),
    "Optimizer.min_dim_size_to_factor": Removed(
        128, "Adafactor factors the second moments of matrices of 128 rows and columns or more"
    ),
    "Optimizer.second_moment_decay": Removed(
        0.8, "Adafactor's second moments decay by 1 - step ** -0.8"
    ),
    "Attention.bits": Removed(63, "hashes have 63 bits"),
    "Attention.hash_offsets": Removed(True, "the planes of a hash have random offsets"),
    "Attention.tile": Removed(0, "brt chooses the size of tiles"),
    "Seq2Seq.remat_keep": Removed("nothing", "Model.remat = True stores the inputs of layers"),
    "Encoder.remat_keep": Removed("nothing", "Model.remat = True stores the inputs of layers"),
    "Encoder.convolution_width": Removed(15, "convolutional positions see 15 inputs"),
    "Encoder.features": Removed(
        0, "the width of the input vectors is that of the data", ignored=True
    ),
    "Encoder.classes": Removed(
        2, "the classifier has an output for each label of the data", ignored=True
    ),
    "Encoder.token_types": Removed(0, "only converted weights have embeddings of token types"),
    "Seq2Seq.global_block": Removed(
        16, "a global token sums up 16 tokens, or as many as converted weights say"
    ),
    "Model.layer_kinds": Removed((), "every kind of layers has a section, which places its layers"),
    "Model.layer_unroll": Removed(
        0, "Model.unroll bounds the layers of an iteration", ignored=True
    ),
    "Model.block_unroll": Removed(
        0, "Model.unroll bounds the blocks of an iteration", ignored=True
    ),
    "CrossAttention.training_form": Removed(
        "auto", "brt chooses the order in which training computes cross-attention", ignored=True
    ),
    "Decoding.batch_size": Removed(None, "Evaluation.batch_size also counts summaries"),
}  # fmt: skip


def refusal(name: str, value: Any) -> str:
    """Returns an error message if an old config gives a removed setting a value that brt no longer
    supports, and "" otherwise.

    Args:
      name: the setting, a key of `REMOVED`.
      value: the value in the old config.
    """
    removed = REMOVED[name]
    value = tuple(value) if isinstance(value, list) else value
    if removed.ignored or removed.value is None or value == removed.value:
        return ""
    return f"{name} = {value!r}, but this setting is gone: {removed.now}"


def note(name: str, value: Any) -> str:
    """Returns a warning that the value which an old config gives a removed setting has no effect.

    The result is "" if brt always behaves as this value says. It is also "" for settings of which
    brt supports one value only and refuses every other value with an error (see `refusal`).

    Args:
      name: the setting, a key of `REMOVED`.
      value: the value in the old config.
    """
    removed = REMOVED[name]
    if not removed.ignored or value == removed.value:
        return ""
    return f"{name} = {value!r} has no effect any more: {removed.now}"


def without_removed(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a saved config without the removed settings, except those whose values brt no longer
    supports, so that readers of the config still see and refuse them.

    Args:
      saved: the values of a saved config by section and field: {"Model": {"layers": 2}}.
    """
    return {
        section: {
            field: value
            for field, value in fields.items()
            if not is_removed(f"{section}.{field}") or refusal(f"{section}.{field}", value)
        }
        if isinstance(fields, Mapping)
        else fields
        for section, fields in saved.items()
    }


def is_removed(field: str) -> bool:
    """Returns True if brt no longer has a field.

    `REMOVED` also contains fields that became derived (the data determine them). .gin files cannot
    set derived fields, but saved configs still contain them, so the result is False for them.

    Args:
      field: the name of the field with its section, such as "Optimizer.momentum".
    """
    return field in REMOVED and field not in class_field_types()
