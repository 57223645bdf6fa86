"""One product of all steps, which their pairs are copied into one array for."""

from jaxtyping import Array, Float

from brt.ops import dense


def weight_gradient(
    x: Float[Array, "N ..."],
    dy: Float[Array, "N ..."],
    inputs: int = 1,
    outputs: int = 1,
    *,
    as_bits: bool = False,
) -> Float[Array, "..."]:
    """See `api.weight_gradient`; products read numbers and bits as they are."""
    return dense.weight_gradient(x, dy, inputs, outputs)
