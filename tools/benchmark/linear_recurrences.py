"""Measures milliseconds per train step of models with linear recurrences, in one run.

    python tools/benchmark/linear_recurrences.py [--rounds=10] [--json=FILE]

A step is the forward and backward pass of the language-model loss in float32, without optimizer and
dropout. The models have the mid size of `lm_step.py`: four layers of width 256, a window of 256
tokens and a segment of 2,048 tokens. In every model but Slide, the third layer is of another kind.
The models take turns, so that other work on the machine slows all of them down alike. The table has
the time of each model's fastest round and the median over rounds of its ratio to Slide.
"""

import argparse
import dataclasses
import statistics

from conditions import report
from lm_step import SIZES, Contestant, models

from brt import runtime
from brt.config import Model
from brt.layers.sections import Recurrence
from brt.memories.gated_delta_net import GatedDeltaNet
from brt.memories.rg_lru import RGLRU
from brt.models.decoder import forward_flops_per_token
from brt.training.state import parameter_counts

LAYER = (2,)
KINDS = {
    "Slide": (),
    "Rec:fixed:skip": (Recurrence(layers=LAYER, states=SIZES["mid"].states),),
    "RG-LRU": (RGLRU(layers=LAYER),),
    "Gated DeltaNet": (GatedDeltaNet(layers=LAYER),),
    "Window and Gated DeltaNet": (GatedDeltaNet(window_layers=LAYER),),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", help="write the rows to this file")
    args = parser.parse_args()
    runtime.keep_memory()
    runtime.disable_async_dispatch()
    slide, lanes, segment = models(SIZES["mid"], 1)["Slide"]
    sizes = {name: dataclasses.replace(slide, kinds=kinds) for name, kinds in KINDS.items()}
    contestants = {name: Contestant(model, lanes, segment) for name, model in sizes.items()}
    for _ in range(args.rounds):
        for contestant in contestants.values():
            contestant.run()
    rows = [row(name, model, contestants) for name, model in sizes.items()]
    print(f"{'model':26}{'parameters':>12}{'ms/step':>9}{'/ Slide':>9}{'FLOPs':>7}{'temp MiB':>10}")
    for r in rows:
        print(
            f"{r['model']:26}{r['parameters']:>12,}{r['milliseconds']:>9.1f}{r['ratio']:>9.3f}"
            f"{r['relative_flops']:>7.3f}{r['temporary_mib']:>10.0f}"
        )
    report(args, rows, sizes)


def row(name: str, model: Model, contestants: dict[str, Contestant]) -> dict[str, object]:
    """Returns the row of a model for the table of results."""
    contestant, slide = contestants[name], contestants["Slide"]
    ratios = (own / other for own, other in zip(contestant.times, slide.times, strict=True))
    flops = forward_flops_per_token(model)
    return {
        "model": name,
        "parameters": parameter_counts(contestant.params)[0],
        "milliseconds": min(contestant.times),
        "ratio": statistics.median(ratios),
        "relative_flops": flops / forward_flops_per_token(dataclasses.replace(model, kinds=())),
        "temporary_mib": contestant.temporary_mib,
    }


if __name__ == "__main__":
    main()
