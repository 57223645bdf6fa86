"""What a kernel is written for, and what it says of other inputs."""

from typing import NamedTuple

from jaxtyping import Array, Float


class Limits(NamedTuple):
    """Of a kernel: tokens of a window, sizes of a head, names of dtypes."""

    windows: tuple[int, ...]
    head_dims: tuple[int, ...]
    dtypes: tuple[str, ...]

    def refuse(self, queries: Float[Array, "B T H K"], cached: tuple[Array, Array]) -> str | None:
        """Why these inputs cannot be; None: they can."""
        window, width = cached[0].shape[1], queries.shape[-1]
        if window not in self.windows:
            return f"has windows of {_listed(self.windows)} tokens, not of {window}"
        if width not in self.head_dims:
            return f"has heads of {_listed(self.head_dims)}, not of {width}"
        if queries.dtype.name not in self.dtypes:
            return f"computes in {' and '.join(self.dtypes)}, not in {queries.dtype}"
        return None


def _listed(numbers: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"
