"""Evaluates the models of a sweep with other kinds of attention: Table 1 of Vyas et al. (2020).

    python tools/attention_matrix.py runs/speech_an4 [--split=test] [--points=full,lsh-1]
        [--kinds=full,clustered,improved_clustered] [--times] [--json=FILE]

The table has a row for every point of the sweep and a column for every kind of attention. Kinds
that use the queries as keys are evaluated only on models that were trained with one projection for
queries and keys. The numbers of clusters, hashing rounds and best keys are those of the training.
A cell contains the error rate in percent, the score, or the bits per token, depending on the task
of the models. With --times, it also contains the milliseconds that the encoder of a speech
recogniser takes for a second of speech.
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any, get_args

from brt.config import Attention, Config
from brt.errors import BrtError
from brt.layers.attention_kinds import KEYS_ARE_QUERIES
from brt.training import evaluations, saved_model

KINDS = get_args(Attention.__annotations__["kind"])
FIGURES = ("token_error_rate", "score", "bits_per_masked_token")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sweep", type=Path, help="the workdir of a sweep")
    parser.add_argument("--split", default="test")
    parser.add_argument("--points", help="directories of points; all")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--times", action="store_true", help="of recognisers, beside the errors")
    parser.add_argument("--json", help="write the table to this file")
    args = parser.parse_args()
    kinds = args.kinds.split(",")
    found = sorted(path.parent for path in args.sweep.glob("*/point.json"))
    if args.points:
        found = [args.sweep / name for name in args.points.split(",")]
    if not found:
        parser.error(f"{args.sweep} has no points")
    print(f"| trained with \\ read with | {' | '.join(kinds)} |\n|{'---|' * (len(kinds) + 1)}")
    table = {}
    for path in found:
        row = table[path.name] = {kind: reading(path, kind, args.split) for kind in kinds}
        cells = (cell(report, args.times) for report in row.values())
        print(f"| {path.name} | {' | '.join(cells)} |", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(table, indent=1))


def reading(path: Path, kind: str, split: str) -> dict[str, Any] | None:
    """Returns the report of an evaluation, or None if the model does not support the kind."""
    try:
        workdir, found, config = saved_model.load_config(path)
        if kind in KEYS_ARE_QUERIES and not config.encoder.shared_queries_keys:
            return None
        config = reading_with(config, kind)
        return evaluations.evaluate(saved_model.load(workdir, found, config), split, None)[0]
    except BrtError as error:
        print(f"{path.name} with {kind}: {error}")
        return None


def cell(report: dict[str, Any] | None, times: bool) -> str:
    if report is None:
        return "-"
    value = f"{next(report[name] for name in FIGURES if name in report):.2f}"
    seconds = report.get("seconds_per_audio_second")
    return f"{value}, {1000 * seconds:.1f} ms" if times and seconds is not None else value


def reading_with(config: Config, kind: str) -> Config:
    attention = dataclasses.replace(config.attention, kind=kind)
    return dataclasses.replace(config, attention=attention)


if __name__ == "__main__":
    main()
