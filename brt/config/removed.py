"""Settings that earlier versions had, so that the configs of their runs can still be read."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from brt.config.kernels import AUTO, OPERATIONS


class Removed(NamedTuple):
    """A setting that is gone.

    Attributes:
      value: the value that a saved config may have, because brt still behaves so; None: any.
      now: what holds instead, the end of a sentence.
    """

    value: Any
    now: str


_SHUFFLED = Removed(True, "training data are shuffled in every epoch")
REMOVED = {
    **{f"{section}.shuffle": _SHUFFLED for section in (
        "Data", "Pairs", "Speech", "Sentences", "Questions",
    )},
    **{f"Kernels.{operation}": Removed(
        AUTO, f"set Kernels.use = ('{operation}=IMPLEMENTATION',)"
    ) for operation in OPERATIONS},
    "Optimizer.momentum": Removed(0.9, "the momentum of Adafactor is 0.9"),
    "Optimizer.second_moment_decay": Removed(
        0.8, "Adafactor's second moments decay by 1 - step ** -0.8"
    ),
    "Attention.bits": Removed(63, "hashes have 63 bits"),
    "Attention.hash_offsets": Removed(True, "the planes of a hash have random offsets"),
    "Attention.tile": Removed(0, "brt chooses the size of tiles"),
    "Seq2Seq.remat_keep": Removed("nothing", "Model.remat = True stores the inputs of layers"),
    "Encoder.remat_keep": Removed("nothing", "Model.remat = True stores the inputs of layers"),
    "Encoder.convolution_width": Removed(15, "convolutional positions see 15 inputs"),
    "Model.layer_kinds": Removed((), "every kind of layers has a section, which places its layers"),
    "Model.layer_unroll": Removed(0, "Model.unroll bounds the layers of an iteration"),
    "Model.block_unroll": Removed(0, "Model.unroll bounds the blocks of an iteration"),
    "Decoding.batch_size": Removed(None, "Evaluation.batch_size also counts summaries"),
}  # fmt: skip


def refusal(name: str, value: Any) -> str:
    """Returns the reason why a removed setting cannot have a value, or "" if it can.

    A setting can have a value if brt behaves as the value says, or if the setting is ignored.

    Args:
      name: a key of `REMOVED`.
    """
    removed = REMOVED[name]
    value = tuple(value) if isinstance(value, list) else value
    if removed.value is None or value == removed.value:
        return ""
    return f"{name} = {value!r}, but this setting is gone: {removed.now}"


def without_removed(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a saved config without the removed settings whose values still hold.

    Implementations of single operations are moved to `Kernels.use`.

    Args:
      saved: the values of a saved config by section and field: {"Model": {"layers": 2}}.
    """
    present = {
        section: {
            field: value
            for field, value in fields.items()
            if f"{section}.{field}" not in REMOVED or refusal(f"{section}.{field}", value)
        }
        if isinstance(fields, Mapping)
        else fields
        for section, fields in saved.items()
    }
    kernels = present.get("Kernels")
    if isinstance(kernels, dict):
        chosen = [f"{name}={kernels.pop(name)}" for name in OPERATIONS if name in kernels]
        if chosen:
            kernels["use"] = chosen
    return present
