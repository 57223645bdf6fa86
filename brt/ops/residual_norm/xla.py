"""RMS normalization of an input that a residual connection reads, too, in plain XLA."""

from jaxtyping import Array, Float

from brt.ops.normalization import rms_norm


def residual_norm(
    x: Float[Array, "*B D"], scale: Float[Array, " D"], epsilon: float
) -> tuple[Float[Array, "*B D"], Float[Array, "*B D"]]:
    """Returns x / rms(x) * scale and x."""
    return rms_norm(x, scale, epsilon), x
