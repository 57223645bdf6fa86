"""What kernels take: the compilers do not say it of programs that they did not write.

Of a TPU kernel the length of its schedule is known, in bundles, one a cycle, for a step of its
grid; waiting for memory is not in it. `tools/benchmark/kernels.py` makes these tables.
"""

import re
from collections.abc import Mapping

_CHIPS = "v4", "v5e", "v5p", "v6e"
# By kernel, window, size of heads and dtype, then by chip: bundles of a step of the grid.
BUNDLES: Mapping[str, Mapping[str, int]] = {
    kernel: dict(zip(_CHIPS, bundles, strict=True))
    for kernel, bundles in {
        "window_attention_128x128_bfloat16": (669, 341, 625, 289),
        "window_attention_256x128_bfloat16": (1215, 747, 1032, 531),
        "window_attention_512x128_bfloat16": (2973, 2108, 2371, 1488),
        "window_attention_512x256_bfloat16": (4246, 3373, 3744, 1843),
        "window_attention_512x64_bfloat16": (2759, 1866, 2164, 1464),
        "window_attention_1024x128_bfloat16": (9582, 6623, 6932, 4793),
        "window_attention_1024x64_bfloat16": (8654, 5885, 6153, 4588),
        "window_attention_backward_128x128_bfloat16": (1123, 678, 1092, 523),
        "window_attention_backward_256x128_bfloat16": (2104, 1622, 2029, 1392),
        "window_attention_backward_512x128_bfloat16": (5151, 4475, 4908, 3662),
        "window_attention_backward_512x256_bfloat16": (8528, 7418, 7861, 4928),
        "window_attention_backward_512x64_bfloat16": (5231, 4658, 5125, 3795),
        "window_attention_backward_1024x128_bfloat16": (15553, 14060, 14594, 9731),
        "window_attention_backward_1024x64_bfloat16": (15767, 14541, 15002, 9982),
    }.items()
}  # fmt: skip
_NAME = re.compile(r"\b(\w+)_(\d+)_steps\b")
_FLOPS = re.compile(r'"cost_estimate":\{"flops":"(\d+)"')


def cycles(attributes: str, chip: str) -> float:
    """Of the call of a kernel, which has its name and how often its grid runs in its own name; 0
    where nothing is known of it."""
    found = _NAME.search(attributes)
    return float(BUNDLES.get(found[1], {}).get(chip, 0) * int(found[2])) if found else 0.0


def flops(attributes: str) -> float:
    """Of products, as the kernel itself says."""
    found = _FLOPS.search(attributes)
    return float(found[1]) if found else 0.0
