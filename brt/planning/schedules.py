"""What kernels take: the compilers do not say it of programs that they did not write.

Of a TPU kernel the length of its schedule is known, in bundles, one a cycle, for a step of its
grid; waiting for memory is not in it. `tools/benchmark/kernels.py` makes these tables.
"""

import re
from collections.abc import Mapping

_CHIPS = "v4", "v5e", "v5p", "v6e"
# By kernel, then by chip: bundles of a step of the grid, bfloat16, of this size.
_WINDOW, _HEAD_DIM = 512, 128
BUNDLES: Mapping[str, Mapping[str, int]] = {
    kernel: dict(zip(_CHIPS, bundles, strict=True))
    for kernel, bundles in {
        "window_attention": (3939, 2621, 2915, 1782),
        "window_attention_backward": (7582, 5690, 6146, 4406),
    }.items()
}
_NAME = re.compile(r"\b([a-z_]+)_(\d+)x(\d+)_\w+_(\d+)_steps\b")
_FLOPS = re.compile(r'"cost_estimate":\{"flops":"(\d+)"')


def cycles(attributes: str, chip: str) -> float:
    """Of the call of a kernel, whose name says how often its grid runs; of another size than that
    of the table as its products compare. 0 where nothing is known of it."""
    found = _NAME.search(attributes)
    if not found:
        return 0.0
    window, width, steps = map(int, found.groups()[1:])
    products = window**2 * width / (_WINDOW**2 * _HEAD_DIM)
    return BUNDLES.get(found[1], {}).get(chip, 0) * products * steps


def flops(attributes: str) -> float:
    """Of products, as the kernel itself says."""
    found = _FLOPS.search(attributes)
    return float(found[1]) if found else 0.0
