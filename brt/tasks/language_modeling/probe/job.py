"""Runs all probes of a checkpoint, which measure how the predictions depend on the memory.

The probes are interventions (a text is read while a part of the memory is replaced before every
segment), gradients through the recurrent states, and the retention of perturbed states.
"""

import math
from typing import Any

import numpy as np
from tqdm import tqdm

from brt.config import Config
from brt.data import losses
from brt.data.preparation import Dataset
from brt.data.token_store import TokenStore
from brt.errors import DataError
from brt.tasks.arguments import Inspection, InspectionRequest
from brt.tasks.language_modeling.probe.gradients import gradient_reach
from brt.tasks.language_modeling.probe.interventions import (
    InterventionResult,
    evaluate_interventions,
)
from brt.tasks.language_modeling.probe.retention import half_life_blocks, retention
from brt.tasks.language_modeling.probe.states import fixed_gate_decay, half_life_tokens
from brt.tasks.language_modeling.probe.text import text
from brt.types import Variables

TOKENS = 1_000_000  # By default, this number of tokens is read with each intervention.
# Positions in a document are grouped into bins. The bins begin at these numbers of tokens.
EDGES = (0, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)


def inspect(variables: Variables, request: InspectionRequest) -> Inspection:
    """Runs all probes, and returns the results with a text and plots."""
    from brt.tasks.language_modeling.probe import plots

    config, dataset, split, tokens, where = request
    count = TOKENS if tokens is None else tokens
    report = {**where, **probe_report(config, variables, dataset, split, count)}
    return Inspection(report, text(report), lambda: plots.draw(report))


def probe_report(
    config: Config, variables: Variables, dataset: Dataset, split: str, tokens: int = 0
) -> dict[str, Any]:
    """Returns the results of all probes as JSON.

    The entries `memory`, `positions`, `layers` and `gradients` are the results of the functions
    `memory`, `positions`, `layers` and `gradient_reach`. The entry `protocol` has the conditions
    under which the text was read, and `verdicts` has a sentence for each part of the memory. About
    `tokens` tokens are read; 0 reads all.
    """
    store, donor = dataset.split(split), dataset.splits.get("train")
    if lost := losses.loss_message(store.lost_bytes, int(store.bytes.sum()), 0):
        raise DataError(f"{split} cannot be probed by bits per byte: {lost}")
    if donor is store:
        donor = None
    total = min(tokens or math.inf, int(store.lengths.sum()))
    with tqdm(total=total, desc=f"probing {split}", unit="tok", unit_scale=True, disable=None) as b:
        result = evaluate_interventions(
            config, variables, dataset.tokenizer, store, donor=donor, tokens=tokens,
            progress=b.update,
        )  # fmt: skip
    rows = memory(result)
    return {
        "protocol": {
            "split": split,
            "documents": len(np.unique(result.document[result.document >= 0])),
            "tokens": int(result.tokens.sum()),
            "bytes": int(result.bytes.sum()),
            "lanes": len(result.document),
            "window": config.model.window,
            "segment_length": config.evaluation_segment_length,
            "training_segment_length": config.training.segment_length,
            "tokenizer": dataset.tokenizer.name,
        },
        "bits_per_byte": result.bits_per_byte(None, result.document >= 0),
        "memory": rows,
        "positions": positions(result),
        "gradients": gradient_reach(config, variables, store),
        "layers": layers(config, variables, store, result),
        "verdicts": [_verdict(row) for row in rows if row["how"] == "zeroed"],
    }


def memory(result: InterventionResult) -> list[dict[str, Any]]:
    """Returns a row, as JSON, for each intervention: bits per byte with it and of the unchanged
    model, both on the same blocks, and their difference.
    """
    rows = []
    for intervention in filter(None, result.nats):
        where = result.counted(intervention)
        normal, bits = (result.bits_per_byte(a, where) for a in (None, intervention))
        rows.append(
            {
                **intervention._asdict(),
                "normal_bits_per_byte": normal,
                "bits_per_byte": bits,
                "difference": bits - normal,
                "standard_error": _finite(result.standard_error(intervention)),
                "tokens": int(result.tokens[where].sum()),
            }
        )
    return rows


def positions(result: InterventionResult) -> list[dict[str, Any]]:
    """Returns a row, as JSON, for each range of positions in a document (see `EDGES`), with the
    bits per byte of the blocks that begin in this range.

    The entry `without` of a row has the bits per byte with each part of the memory zeroed.
    """
    rows = []
    for begin, end in zip(EDGES, (*EDGES[1:], None), strict=True):
        where = (result.document >= 0) & (result.position >= begin)
        where &= result.position < (end or np.inf)
        if not result.bytes[where].any():
            continue
        zeroed = [i for i in result.nats if i and i.how == "zeroed"]
        rows.append(
            {
                "from": begin,
                "to": end,
                "tokens": int(result.tokens[where].sum()),
                "bytes": int(result.bytes[where].sum()),
                "bits": float(result.nats[None][where].sum() / math.log(2)),
                "bits_per_byte": result.bits_per_byte(None, where),
                "standard_error": _finite(result.bits_error(where)),
                "without": {i.part: result.bits_per_byte(i, where) for i in zeroed},
            }
        )
    return rows


def layers(
    config: Config, variables: Variables, store: TokenStore, result: InterventionResult
) -> list[dict[str, Any]]:
    """Returns a row, as JSON, for each layer with a recurrent state: metrics of its gate and of its
    states, and the number of tokens after which half of a perturbation of the states remains.
    """
    window = config.model.block_length
    decays = fixed_gate_decay(config.model, variables.params)
    rows = []
    for layer, left in retention(config, variables, store).items():
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
                "state": result.states.get(layer),
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
