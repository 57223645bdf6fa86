"""Products with weights: a matrix, or a kernel whose inputs or outputs are several axes.

Where heads are sharded, merging them with another axis would move data. XLA's CPU backend writes
the factors of a product over several axes anew, transposed: there they are merged, which is free.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from brt.distributed.rules import cuts, rows_adjoin
from brt.ops import dispatch
from brt.ops.layout import transposed


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def dense(x: Float[Array, "..."], kernel: Float[Array, "..."], inputs: int = 1) -> Array:
    """[*rows, *inputs] x [*inputs, *outputs] -> [*rows, *outputs] in x's dtype.

    Args:
      inputs: how many axes are summed over: the last of x, the first of the kernel.
    """
    return _dense(x, kernel, inputs)


def _dense(x: Array, kernel: Array, inputs: int) -> Array:
    kernel = kernel.astype(x.dtype)
    if not _merges(kernel):
        return jnp.tensordot(x, kernel, axes=inputs)
    y = jnp.tensordot(_merged(x, inputs), _matrix(kernel, inputs), axes=1)
    return y.reshape(*x.shape[: x.ndim - inputs], *kernel.shape[inputs:])


def dense_forward(x: Array, kernel: Array, inputs: int) -> tuple[Array, tuple[Array, Array]]:
    """The product, seen by `remat_keep`, and what its gradients need."""
    return _dense(x, kernel, inputs), (x, kernel)


def _backward(inputs: int, saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, kernel = saved
    dx = input_gradient(kernel, gradient, inputs)
    return dx, weight_gradient(x, gradient, inputs, kernel.ndim - inputs).astype(kernel.dtype)


def input_gradient(kernel: Float[Array, "..."], dy: Float[Array, "..."], inputs: int = 1) -> Array:
    """[*inputs, *outputs], [*rows, *outputs] -> [*rows, *inputs] in dy's dtype."""
    outputs, kernel = kernel.ndim - inputs, kernel.astype(dy.dtype)
    if cuts("heads") or dispatch.backend() != "cpu":
        axes = tuple(range(dy.ndim - outputs, dy.ndim)), tuple(range(inputs, kernel.ndim))
        return jnp.tensordot(dy, kernel, axes=axes)
    # Of 512 rows a product with the transpose takes XLA's CPU backend 1.2 to 1.4 times as long.
    dx = jnp.matmul(_merged(dy, outputs), transposed(_matrix(kernel, inputs)))
    return dx.reshape(*dy.shape[: dy.ndim - outputs], *kernel.shape[:inputs])


def weight_gradient(
    x: Float[Array, "..."], dy: Float[Array, "..."], inputs: int = 1, outputs: int = 1
) -> Array:
    """The sum over all rows of x^T dy, [*inputs, *outputs] in float32.

    Over one axis of rows: for a sum over two, XLA's CPU backend writes both factors anew,
    transposed, which takes longer than the product of a small model.
    """
    shape = (*x.shape[x.ndim - inputs :], *dy.shape[dy.ndim - outputs :])
    rows = tuple(range(x.ndim - inputs))
    if not rows_adjoin(len(rows)) or cuts("heads"):
        return jnp.tensordot(x, dy, axes=(rows, rows), preferred_element_type=jnp.float32)
    if dispatch.backend() == "cpu":
        return _over_rows(_merged(x, inputs), _merged(dy, outputs)).reshape(shape)
    x = x.reshape(-1, *x.shape[x.ndim - inputs :])
    dy = dy.reshape(-1, *dy.shape[dy.ndim - outputs :])
    return jnp.tensordot(x, dy, axes=(0, 0), preferred_element_type=jnp.float32).reshape(shape)


def _over_rows(x: Float[Array, "*R M"], dy: Float[Array, "*R N"]) -> Float[Array, "M N"]:
    """By a product along rows of the narrower, turned; of columns with columns it takes longer."""
    x, dy = (part.reshape(-1, part.shape[-1]) for part in (x, dy))
    if x.shape[-1] > dy.shape[-1]:
        return transposed(_over_rows(dy, x))
    return jnp.matmul(transposed(x), dy, preferred_element_type=jnp.float32)


def _merges(kernel: Array) -> bool:
    return kernel.ndim > 2 and dispatch.backend() == "cpu" and not cuts("heads")


def _merged(x: Array, axes: int) -> Array:
    """With so many of its last axes as one; spelt out, as there may be no rows."""
    return x.reshape(*x.shape[: x.ndim - axes], math.prod(x.shape[x.ndim - axes :]))


def _matrix(kernel: Array, inputs: int) -> Array:
    return kernel.reshape(math.prod(kernel.shape[:inputs]), math.prod(kernel.shape[inputs:]))


dense.defvjp(dense_forward, _backward)
