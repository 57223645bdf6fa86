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
        "window_attention_512x128_bfloat16": (3939, 2621, 2915, 1782),
        "window_attention_backward_512x128_bfloat16": (7582, 5690, 6146, 4406),
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
