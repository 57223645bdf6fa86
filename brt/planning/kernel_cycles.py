"""Cycles of Pallas kernels, which the compilers do not estimate.

The compiler schedules a TPU kernel as bundles of instructions. Each bundle takes a cycle, unless it
waits for memory. `tools/benchmark/kernels.py` counts the bundles of a grid step for the tables
below. The tool counts the body of a loop once.

A pass is the sequence of grid steps that differ only in the last axis of the grid. The first and
the last step of a pass may execute instructions that all other steps skip, for example to set sums
to zero and to write them. The name of such a kernel contains the number of passes.
"""

import math
import re
from collections.abc import Mapping

# The version of libtpu, the TPU compiler, with which the bundles below were counted. With version
# 0.0.50.1, the schedules of some kernels are longer.
LIBTPU = "0.0.42.1"
_CHIPS = "v4", "v5e", "v5p", "v6e"


def _by_chip(table: Mapping[str, tuple[int, ...]]) -> dict[str, dict[str, int]]:
    """Returns, for each kernel, a dictionary from the name of a chip to the number of bundles."""
    return {kernel: dict(zip(_CHIPS, numbers, strict=True)) for kernel, numbers in table.items()}


# A chip of type v4 or v5p has two cores. Each core runs half of the steps of a kernel's grid.
_CORES = {"v4": 2, "v5p": 2}
# BUNDLES has the number of bundles of a grid step in bfloat16, per kernel and chip. Bundles that
# are executed only once in a pass are not included; PASS_BUNDLES has their number. 0 bundles mean
# that the chip cannot or need not run the kernel. The numbers in a name are sizes of the arrays of
# a grid step, such as queries, keys and head size. The compiler may produce different schedules for
# the same kernel when other code changes; the table has the longest schedule that was observed.
BUNDLES: Mapping[str, Mapping[str, int]] = _by_chip(
    {
        # The sizes of attention are heads, queries, keys and the total width of the heads, all of a
        # grid step. The kernels `document_attention_*1x2048x2048x128` were counted on v5p and v6e
        # in an earlier version of their code.
        "window_attention_1x512x512x128": (3948, 2364, 2668, 1585),
        "window_attention_backward_1x512x512x128": (5955, 4173, 4440, 2853),
        "window_attention_dropout_1x512x512x128": (4628, 2488, 2830, 1674),
        "window_attention_backward_dropout_1x512x512x128": (6618, 4219, 4498, 3077),
        "document_attention_1x512x512x128": (3015, 2078, 2379, 1484),
        "document_attention_backward_1x512x512x128": (4230, 3548, 3716, 2414),
        # Layers of Llama 3.2 1B and SmolLM2-135M have windows of 2,048 and heads of 64. On v4, the
        # arrays of a window do not fit into VMEM, so a window is split into sub-windows of 1,024.
        "window_attention_1x1024x1024x64": (8977, 5315, 5764, 3881),
        "window_attention_backward_1x1024x1024x64": (12354, 11490, 11835, 6229),
        "document_attention_1x1024x1024x64": (9491, 5610, 6009, 4215),
        "document_attention_backward_1x1024x1024x64": (12435, 11565, 11881, 6520),
        "window_attention_1x1024x1024x128": (9408, 6241, 6521, 4600),
        "window_attention_backward_1x1024x1024x128": (12614, 11792, 11912, 6418),
        "document_attention_1x1024x1024x128": (10250, 6541, 6673, 4952),
        "document_attention_backward_1x1024x1024x128": (12590, 11711, 11645, 6763),
        "window_attention_1x2048x2048x64": (0, 21834, 22344, 13815),
        "window_attention_backward_1x2048x2048x64": (0, 42080, 42412, 22774),
        "document_attention_1x2048x2048x64": (0, 22587, 22981, 15410),
        "document_attention_backward_1x2048x2048x64": (0, 42549, 41599, 23484),
        "window_attention_1x2048x2048x128": (0, 25385, 26119, 14807),
        "window_attention_backward_1x2048x2048x128": (0, 42288, 42775, 22914),
        "document_attention_1x2048x2048x128": (0, 26207, 22242, 14609),
        "document_attention_backward_1x2048x2048x128": (0, 42691, 41087, 23229),
        "accumulate_fire_16x64x128": (2343, 1915, 1766, 2049),
        "accumulate_fire_backward_16x64x128": (5353, 4398, 4094, 5018),
        # The sizes are segments, queries and the total width of the heads of a grid step.
        "segment_states_16x128x128": (1288, 903, 983, 819),
        "segment_states_backward_16x128x128": (1931, 1364, 1471, 1126),
        # Kernels `_of_keys` have one mask for all queries, and kernels `_of_masks` have a mask for
        # each query. Kernels `_of_spans` have a span of keys for each query.
        "slab_attention_of_keys_2x1024x1024x128": (0, 9269, 8681, 6390),
        "slab_attention_of_keys_backward_2x1024x1024x128": (0, 19573, 17680, 10167),
        "slab_attention_of_keys_dropout_2x1024x1024x128": (0, 18673, 18480, 16572),
        "slab_attention_of_keys_backward_dropout_2x1024x1024x128": (0, 28429, 26537, 21237),
        "slab_attention_of_keys_2x128x1024x128": (2373, 0, 0, 0),
        "slab_attention_of_keys_backward_2x128x1024x128": (3315, 0, 0, 0),
        "slab_attention_of_keys_dropout_2x128x1024x128": (20067, 0, 0, 0),
        "slab_attention_of_keys_backward_dropout_2x128x1024x128": (20846, 0, 0, 0),
        "slab_attention_of_masks_2x128x1024x128": (3614, 1838, 1716, 1706),
        "slab_attention_of_masks_backward_2x128x1024x128": (4835, 3122, 2819, 1810),
        "slab_attention_of_spans_1x512x1024x128": (4061, 2878, 3036, 2045),
        "slab_attention_of_spans_1x512x512x128": (2259, 1576, 1731, 1149),
        "slab_attention_of_spans_backward_1x512x1024x128": (5521, 4813, 4924, 2983),
        "slab_attention_of_spans_backward_1x512x512x128": (2880, 2452, 2675, 1584),
        "slab_attention_of_keys_1x128x2048x128": (2380, 0, 0, 0),
        "slab_attention_of_keys_backward_1x128x2048x128": (2703, 0, 0, 0),
        "slab_attention_of_keys_1x128x4096x128": (0, 3458, 3647, 2867),
        "slab_attention_of_keys_backward_1x128x4096x128": (0, 5120, 5260, 2854),
        "slab_attention_of_masks_1x128x2048x128": (3806, 1559, 1728, 1580),
        "slab_attention_of_masks_backward_1x128x2048x128": (4992, 2504, 2700, 1479),
        "state_attention_512x1536x128": (7416, 4971, 5030, 2968),
        "state_attention_backward_512x1536x128": (12483, 8817, 8717, 5370),
        "cross_entropy_512x640x1024": (11345, 9538, 10120, 4032),
        "cross_entropy_backward_512x640x1024": (9555, 8748, 8913, 2953),
        # Bundles are added over three steps of the grid, which are the phases of a tile of rows.
        "adafactor_64x4096": (4393, 2772, 2892, 2146),
        "adafactor_128x1024": (2441, 1583, 1758, 1434),
        "adafactor_32x1024": (1396, 0, 0, 0),
        "slab_attention_1x512x512x128": (2471, 1649, 1807, 1204),
        "slab_attention_backward_1x512x512x128": (3608, 2852, 3144, 1946),
    }
)
PASS_BUNDLES: Mapping[str, Mapping[str, int]] = _by_chip(
    {
        "window_attention_backward_1x512x512x128": (455, 420, 676, 236),
        "window_attention_backward_dropout_1x512x512x128": (456, 420, 696, 236),
        "document_attention_backward_1x512x512x128": (348, 334, 586, 190),
        "window_attention_backward_1x1024x1024x64": (753, 782, 1034, 398),
        "document_attention_backward_1x1024x1024x64": (753, 782, 1034, 398),
        "window_attention_backward_1x1024x1024x128": (738, 654, 906, 368),
        "document_attention_backward_1x1024x1024x128": (738, 654, 906, 368),
        "window_attention_backward_1x2048x2048x64": (0, 1550, 1794, 782),
        "document_attention_backward_1x2048x2048x64": (0, 1550, 1794, 782),
        "window_attention_backward_1x2048x2048x128": (0, 1294, 1538, 721),
        "document_attention_backward_1x2048x2048x128": (0, 1294, 783, 465),
        "cross_entropy_512x640x1024": (2330, 1668, 1639, 953),
        "cross_entropy_backward_512x640x1024": (641, 646, 646, 326),
    }
)
# The optimizer's kernel computes in float32. The bundles of all other kernels are for bfloat16, and
# are not used for float32, because float32 products take several times as long.
_TYPES = {"adafactor": "float32"}
_NAME = re.compile(r"\b([a-z_]+)_((?:\d+x)+\d+)_([a-z]+\d+)_(\d+)_steps(?:_in_(\d+)_passes)?\b")
_FLOPS, _BYTES = (
    re.compile(rf'"cost_estimate":\s*\{{[^{{}}]*"{name}":\s*"?(\d+)')
    for name in ("flops", "bytes_accessed")
)


def cycles(attributes: str, chip: str) -> float:
    """Returns the cycles of one call of a Pallas kernel on a chip; 0 if BUNDLES lacks them.

    The attributes of the instruction that calls a kernel contain the kernel's name, and the name
    contains the sizes and the number of grid steps. If the table has the kernel only with other
    sizes, the cycles of these sizes are scaled by the amount of work.
    """
    match = _NAME.search(attributes)
    if not match:
        return 0.0
    kernel, size, dtype, steps, passes = match.groups()
    name = f"{kernel}_{size}"
    others = (
        other
        for other, bundles in BUNDLES.items()
        if other.rpartition("_")[0] == kernel and bundles.get(chip)
    )
    known = name if BUNDLES.get(name, {}).get(chip) else next(others, None)
    if not known or not dtype.startswith(_TYPES.get(kernel, "bfloat16")):
        return 0.0
    bundles = BUNDLES[known][chip] * int(steps)
    bundles += PASS_BUNDLES.get(known, {}).get(chip, 0) * int(passes or steps)
    return bundles * _work(name) / _work(known) / _CORES.get(chip, 1)


def kernels(attributes: str) -> set[str]:
    """Returns the name, with sizes and dtype, of the Pallas kernel that an instruction calls.

    The result is a set, so that callers can unite several results. It is empty if the instruction
    calls no Pallas kernel.
    """
    match = _NAME.search(attributes)
    return {"_".join(match.groups()[:3])} if match else set()


def _work(name: str) -> int:
    """Returns the product of the sizes in a name, to which a step's work is proportional."""
    return math.prod(int(n) for n in name.rpartition("_")[2].split("x"))


def flops(attributes: str) -> float:
    """Returns the FLOPs that a Pallas kernel states in its cost estimate; 0 if it states none."""
    match = _FLOPS.search(attributes)
    return float(match[1]) if match else 0.0


def bytes_accessed(attributes: str) -> int:
    """Returns the bytes of HBM that a kernel states in its cost estimate; 0 if it states none."""
    match = _BYTES.search(attributes)
    return int(match[1]) if match else 0
