"""The gradient of a weight that all steps of a loop use, in plain XLA: one product over all steps.

XLA first copies the arrays of the steps into one array.
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
    """Returns the gradient of a weight [*inputs, *outputs], summed over N steps, in float32.

    Args:
      x: [N, *rows, *inputs], the input that the weight was multiplied by in each step; *rows stands
        for any axes.
      dy: [N, *rows, *outputs], the gradient of the product in each step.
      inputs, outputs: the numbers of the weight's input axes and of its output axes.
      as_bits: ignored. True tells the TPU kernels that layers stored x as integers with the same
        bits (`dispatch.output_residual`), so that the kernels can read these integers. XLA's
        products read x as floating-point numbers.
    """
    return dense.weight_gradient(x, dy, inputs, outputs)
