"""Weight gradients in plain XLA: one product over all steps, whose pairs are copied into
one array.
"""

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
    """Implements `api.weight_gradient`; products read numbers and bits without conversion."""
    return dense.weight_gradient(x, dy, inputs, outputs)
