"""What kernels take: the compilers do not say it of programs that they did not write.

Of a TPU kernel the length of its schedule is known, in bundles, one a cycle, for a step of its
grid; waiting for memory is not in it. `tools/benchmark/kernels.py` makes these tables; of loops it
counts the body once, and those of improved clustered attention are multiplied here.
"""

import math
import re
from collections.abc import Mapping

_CHIPS = "v4", "v5e", "v5p", "v6e"
_CORES = {"v4": 2, "v5p": 2}  # of a chip: their compiled kernels do half of the grid's steps each
# By kernel of this size (queries, keys, what a head has; segments, their tokens, what heads have;
# tokens, clusters) and by chip: bundles of a step, bfloat16; 0 where it has no room or use for it.
# Of one and the same kernel the compiler may make several schedules, with what else changes in the
# sources: the longest seen is here.
BUNDLES: Mapping[str, Mapping[str, int]] = {
    kernel: dict(zip(_CHIPS, bundles, strict=True))
    for kernel, bundles in {
        "window_attention_512x512x128": (4157, 2661, 3032, 1807),
        "window_attention_backward_512x512x128": (7901, 5910, 6452, 4621),
        "window_attention_dropout_512x512x128": (4576, 2794, 3203, 1867),
        "window_attention_backward_dropout_512x512x128": (8665, 6142, 6707, 4928),
        "bias_tile_512x128": (1133, 354, 426, 299),
        "bias_tile_512x256": (1152, 399, 471, 314),
        "bias_gradient_512x128": (883, 401, 485, 390),
        "accumulate_fire_16x64x128": (2343, 1915, 1766, 2049),
        "accumulate_fire_backward_16x64x128": (5353, 4398, 4094, 5018),
        "kmeans_4096x128": (2949, 2342, 2381, 1540),
        "clustered_attention_4096x112": (6101, 4370, 4453, 3083),
        "clustered_attention_backward_4096x112": (7620, 5945, 6188, 5066),
        "improved_clustered_2048x32": (46644, 29052, 29451, 26852),
        "improved_clustered_backward_2048x32": (121200, 41321, 41625, 37349),
        "causal_clustered_512x1536x128": (7798, 5977, 6303, 4534),
        "causal_clustered_backward_512x1536x128": (9868, 8379, 8788, 5510),
        "state_attention_512x1536x128": (7597, 5699, 5729, 3814),
        "state_attention_backward_512x1536x128": (12932, 8980, 9200, 5883),
        "recurrent_cell_512x4608x128": (0, 11638, 12035, 6062),
        "recurrent_cell_backward_512x4608x128": (0, 15725, 16475, 9270),
        "cross_entropy_512x640x1024": (13628, 11206, 11224, 4912),
        "cross_entropy_backward_512x640x1024": (10196, 9394, 9559, 3279),
        "weight_gradient_4096x512x256": (8801, 9295, 8224, 5144),  # v6e: or 3272, or 3658
        "spread_512x1024x512": (4029, 0, 3771, 0),
        "gathered_512x2048x256": (3525, 0, 2991, 0),
        "gathered_512x4096x256": (7957, 0, 7302, 0),
        "softmax_attention_512x512x128": (2500, 2074, 2203, 1499),
        "softmax_attention_backward_512x512x128": (4013, 3020, 3370, 2188),
    }.items()
}
# What other kernels than those of bfloat16 have in their names. In float32 products take several
# times as long, and how much longer a kernel is nobody knows.
_TYPES = {"bias_tile": "float32", "bias_gradient": "float32", "kmeans": "bits"}
# Of improved clustered attention: what does not grow with the tokens takes as long as so many, by
# whole layers of 1,024 to 16,384 tokens on a v5e; and the best keys of a cluster that it is known
# for, since look-ups go with their number and logits do not.
_BESIDE, _BEST = 700, 32
_NAME = re.compile(r"\b([a-z_]+)_((?:\d+x)+\d+)_([a-z]+\d+)_(\d+)_steps\b")
_FLOPS = re.compile(r'"cost_estimate":\s*\{[^{}]*"flops":\s*"?(\d+)')


def cycles(attributes: str, chip: str) -> float:
    """Of the call of a kernel, whose name says how often its grid runs; of another size than that
    of the table as its work compares. 0 where nothing is known of it."""
    found = _NAME.search(attributes)
    if not found:
        return 0.0
    kernel, size, dtype, steps = found.groups()
    sizes = [known for known in BUNDLES if known.rpartition("_")[0] == kernel]
    if not sizes or not dtype.startswith(_TYPES.get(kernel, "bfloat16")):
        return 0.0
    name = f"{kernel}_{size}"
    known = name if name in sizes else sizes[0]
    own = int(steps) / _CORES.get(chip, 1)
    return BUNDLES[known].get(chip, 0) * _work(name) / _work(known) * own


def kernels(attributes: str) -> set[str]:
    """The one that is called, if any, with its size and type."""
    found = _NAME.search(attributes)
    return {"_".join(found.groups()[:3])} if found else set()


def _work(name: str) -> int:
    """Of a step, to be compared with that of the same kernel: products, by the size that ends the
    name. 0: it does not compare."""
    kernel, _, size = name.rpartition("_")
    sizes = [int(n) for n in size.split("x")]
    if kernel.startswith("improved_clustered"):
        tokens, best = sizes
        return tokens + _BESIDE if best == _BEST else 0
    return math.prod(sizes)


def flops(attributes: str) -> float:
    """Of products, as the kernel itself says."""
    found = _FLOPS.search(attributes)
    return float(found[1]) if found else 0.0
