"""The sizes and dtypes that a kernel of window attention supports, and a check of inputs."""

from typing import NamedTuple

from jaxtyping import Array, Float

from brt.ops.head_limits import alternatives, heads_refusal


class Limits(NamedTuple):
    """Sizes and dtypes of inputs that a kernel supports."""

    windows: tuple[int, ...]
    head_dims: tuple[int, ...]
    dtypes: tuple[str, ...]

    def refusal(self, queries: Float[Array, "B T H K"], window: int) -> str | None:
        if window not in self.windows:
            return f"has windows of {alternatives(self.windows)} tokens, not of {window}"
        return heads_refusal(queries, self.head_dims, self.dtypes)
