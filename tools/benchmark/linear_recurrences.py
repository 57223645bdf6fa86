"""Measures milliseconds per train step of models with linear recurrences, in one run.

    python tools/benchmark/linear_recurrences.py [--rounds=10] [--json=FILE]

A step is the forward and backward pass of the language-model loss in float32, without optimizer and
dropout. The models have the mid size of `lm_step.py`: four layers of width 256, a window of 256
tokens and a segment of 2,048 tokens. In every model but Slide, the third layer is of another kind.
The models take turns, so that other work on the machine slows all of them down alike. The table has
the time of each model's fastest round and the median over rounds of its ratio to Slide.
"""

import dataclasses

from conditions import report
from flags import parser
from lm_step import SIZES, Step, models
from timing import interleaved, ratio, show

from brt import runtime
from brt.layers.sections import Recurrence
from brt.memories.gated_delta_net import GatedDeltaNet
from brt.memories.rg_lru import RGLRU
from brt.models.decoder import forward_flops_per_token

LAYER = (2,)
KINDS = {
    "Slide": (),
    "Rec:fixed:skip": (Recurrence(layers=LAYER, states=SIZES["mid"].states),),
    "RG-LRU": (RGLRU(layers=LAYER),),
    "Gated DeltaNet": (GatedDeltaNet(layers=LAYER),),
    "Window and Gated DeltaNet": (GatedDeltaNet(window_layers=LAYER),),
}


def main() -> None:
    args = parser(__doc__, rounds=10).parse_args()
    runtime.keep_memory()
    runtime.disable_async_dispatch()
    slide, lanes, segment = models(SIZES["mid"], 1)["Slide"]
    sizes = {name: dataclasses.replace(slide, kinds=kinds) for name, kinds in KINDS.items()}
    steps = {name: Step(model, lanes, segment) for name, model in sizes.items()}
    times = interleaved({name: one.run for name, one in steps.items()}, args.rounds)
    flops = forward_flops_per_token(slide)
    rows = [
        one.row(name, times)
        | {
            "ratio": ratio(times, name, "Slide"),
            "relative_flops": forward_flops_per_token(one.model) / flops,
        }
        for name, one in steps.items()
    ]
    show("A step; ratios are to Slide", rows)
    report(args, rows, sizes)


if __name__ == "__main__":
    main()
