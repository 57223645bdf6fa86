"""The sizes and dtypes of heads that kernels support, and a check of inputs."""

from collections.abc import Sequence

from jaxtyping import Array


def alternatives(numbers: Sequence[int]) -> str:
    """Returns the numbers, two or more, as text for an error, such as "64, 128 or 256"."""
    return f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"


def heads_refusal(x: Array, head_dims: Sequence[int], dtypes: Sequence[str]) -> str | None:
    """Returns why a kernel does not support heads of the size and dtype of x, or None."""
    if x.shape[-1] not in head_dims:
        return f"has heads of {alternatives(head_dims)}, not of {x.shape[-1]}"
    if x.dtype.name not in dtypes:
        return f"computes in {' and '.join(dtypes)}, not in {x.dtype}"
    return None
