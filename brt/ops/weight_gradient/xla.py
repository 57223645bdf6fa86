"""Weight gradients in plain XLA: one product over the arrays of all steps, copied into one
array.
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
    """Returns the gradient of a kernel [*inputs, *outputs], summed over N steps, in float32.

    The arguments are the same as for `api.weight_gradient`. XLA's products read an x that is stored
    as bits (`as_bits`) like any other, without a conversion here.
    """
    return dense.weight_gradient(x, dy, inputs, outputs)
