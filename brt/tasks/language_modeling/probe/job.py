"""What a model does with its memory: all probes of a checkpoint, as figures and as files."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Array, PyTree
from tqdm import tqdm

from brt.config import Config
from brt.data import losses
from brt.data.preparation import Dataset
from brt.data.token_store import TokenStore
from brt.errors import DataError
from brt.layers.stack import ModelState
from brt.tasks.language_modeling.probe.gradients import gradient_reach
from brt.tasks.language_modeling.probe.reading import Reading, read
from brt.tasks.language_modeling.probe.retention import half_life_blocks, retention
from brt.tasks.language_modeling.probe.states import fixed_gate_decay, half_life_tokens
from brt.tasks.language_modeling.probe.text import text
from brt.tasks.protocol import Inspection

TOKENS = 1_000_000  # read by default, in every way
# Where bins of the position in a document begin, in tokens.
EDGES = (0, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)


def inspect(
    config: Config,
    params: PyTree[Array],
    dataset: Dataset,
    split: str,
    tokens: int | None,
    where: Mapping[str, Any],
    model_state: ModelState | None = None,
) -> Inspection:
    """`figures` of about so many tokens, the longest documents first; 0: all."""
    from brt.tasks.language_modeling.probe import plots

    count = TOKENS if tokens is None else tokens
    found = {**where, **figures(config, params, dataset, split, count, model_state)}
    return Inspection(found, text(found), lambda: plots.draw(found))


def figures(
    config: Config,
    params: PyTree[Array],
    dataset: Dataset,
    split: str,
    tokens: int = 0,
    model_state: ModelState | None = None,
) -> dict[str, Any]:
    """All probes as JSON: protocol, memory, positions, gradients and layers.

    `memory` has a row for every part of the memory and everything that may stand in its place;
    `layers` has a row for every recurrent layer.
    """
    store, donor = dataset.split(split), dataset.splits.get("train")
    if lost := losses.described(store.lost_bytes, int(store.bytes.sum()), 0):
        raise DataError(f"{split} cannot be probed by bits per byte: {lost}")
    if donor is store:
        donor = None
    total = min(tokens or math.inf, int(store.lengths.sum()))
    with tqdm(total=total, desc=f"probing {split}", unit="tok", unit_scale=True, disable=None) as b:
        reading = read(
            config, params, dataset.tokenizer, store, model_state=model_state, donor=donor,
            tokens=tokens, progress=b.update,
        )  # fmt: skip
    rows = memory(reading)
    return {
        "protocol": {
            "split": split,
            "documents": len(np.unique(reading.document[reading.document >= 0])),
            "tokens": int(reading.tokens.sum()),
            "bytes": int(reading.bytes.sum()),
            "lanes": len(reading.document),
            "window": config.model.window,
            "segment_length": config.evaluation_segment_length,
            "training_segment_length": config.training.segment_length,
            "tokenizer": dataset.tokenizer.name,
        },
        "bits_per_byte": reading.bits_per_byte(None, reading.document >= 0),
        "memory": rows,
        "positions": positions(reading),
        "gradients": gradient_reach(config, params, store, model_state),
        "layers": layers(config, params, store, reading, model_state),
        "verdicts": [_verdict(row) for row in rows if row["how"] == "zeroed"],
    }


def memory(reading: Reading) -> list[dict[str, Any]]:
    """What each part is worth: bits per byte as it is and with it replaced, on equal blocks."""
    rows = []
    for arm in filter(None, reading.nats):
        where = reading.counted(arm)
        normal, bits = (reading.bits_per_byte(a, where) for a in (None, arm))
        rows.append(
            {
                **arm._asdict(),
                "normal_bits_per_byte": normal,
                "bits_per_byte": bits,
                "difference": bits - normal,
                "standard_error": _finite(reading.standard_error(arm)),
                "tokens": int(reading.tokens[where].sum()),
            }
        )
    return rows


def positions(reading: Reading) -> list[dict[str, Any]]:
    """Bits by position; a block counts where it begins. `without` has each part zeroed."""
    rows = []
    for begin, end in zip(EDGES, (*EDGES[1:], None), strict=True):
        where = (reading.document >= 0) & (reading.position >= begin)
        where &= reading.position < (end or np.inf)
        if not reading.bytes[where].any():
            continue
        zeroed = [arm for arm in reading.nats if arm and arm.how == "zeroed"]
        rows.append(
            {
                "from": begin,
                "to": end,
                "tokens": int(reading.tokens[where].sum()),
                "bytes": int(reading.bytes[where].sum()),
                "bits": float(reading.nats[None][where].sum() / math.log(2)),
                "bits_per_byte": reading.bits_per_byte(None, where),
                "standard_error": _finite(reading.bits_error(where)),
                "without": {arm.part: reading.bits_per_byte(arm, where) for arm in zeroed},
            }
        )
    return rows


def layers(
    config: Config,
    params: PyTree[Array],
    store: TokenStore,
    reading: Reading,
    model_state: ModelState | None = None,
) -> list[dict[str, Any]]:
    """The gate, the horizon and the states of every recurrent layer."""
    window = config.model.window
    decays = fixed_gate_decay(config.model, params)
    rows = []
    for layer, left in retention(config, params, store, model_state).items():
        gate = None
        if layer in decays:
            half_lives = half_life_tokens(decays[layer], window)
            gate = {
                "openness": _distribution(np.exp(-np.asarray(decays[layer]))),
                "half_life_blocks": _distribution(np.asarray(half_lives) / window),
                "half_life_tokens": _distribution(np.asarray(half_lives)),
            }
        blocks = half_life_blocks(left) if left else None
        rows.append(
            {
                "layer": layer,
                "gate": gate,
                "retention": left,
                "half_life_blocks": blocks,
                "half_life_tokens": None if blocks is None else blocks * window,
                "state": reading.states.get(layer),
            }
        )
    return rows


def _distribution(values: np.ndarray) -> dict[str, float]:
    names = ("min", "lower_quartile", "median", "upper_quartile", "max")
    quantiles = np.quantile(values, [0, 0.25, 0.5, 0.75, 1])
    return dict(zip(names, map(float, quantiles), strict=True))


def _verdict(row: dict[str, Any]) -> str:
    part, difference, error = row["part"], row["difference"], row["standard_error"]
    if difference == 0:
        return f"the {part} changes nothing: the model does not read it"
    if error is None or abs(difference) < 2 * error:
        return f"the {part} makes no difference that {row['tokens']:,} tokens can show"
    worth = "saves" if difference > 0 else "costs"
    return f"the {part} {worth} {abs(difference):.4f} bits per byte"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
