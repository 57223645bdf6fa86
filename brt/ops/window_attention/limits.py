"""The inputs that a kernel supports, and the reason that it gives for refusing others."""

from typing import NamedTuple

from jaxtyping import Array, Float


class Limits(NamedTuple):
    """Inputs that a kernel supports.

    Attributes:
      windows: numbers of tokens of a window.
      head_dims: sizes of a head.
      dtypes: names of dtypes.
    """

    windows: tuple[int, ...]
    head_dims: tuple[int, ...]
    dtypes: tuple[str, ...]

    def refuse(self, queries: Float[Array, "B T H K"], cached: tuple[Array, Array]) -> str | None:
        """Returns why these inputs are not supported, or None if they are."""
        window, width = cached[0].shape[1], queries.shape[-1]
        if window not in self.windows:
            return f"has windows of {_alternatives(self.windows)} tokens, not of {window}"
        if width not in self.head_dims:
            return f"has heads of {_alternatives(self.head_dims)}, not of {width}"
        if queries.dtype.name not in self.dtypes:
            return f"computes in {' and '.join(self.dtypes)}, not in {queries.dtype}"
        return None


def _alternatives(numbers: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"
