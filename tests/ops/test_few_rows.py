"""Tests products of a few vectors: the forms for CPUs equal the products of all rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt.ops import dispatch, few_rows

TOLERANCE = 1e-5  # of float32 sums over 24 products of magnitude 1


@pytest.mark.parametrize("rows", [1, 2, 4, 5])
def test_products_of_rows_equal_those_of_a_matrix(rows: int) -> None:
    a, b = (
        jax.random.normal(jax.random.key(i), s)
        for i, s in enumerate([(2, 3, rows, 24), (2, 3, 24, 7)])
    )
    np.testing.assert_allclose(
        few_rows.stacked_products(a, b), jnp.matmul(a, b), rtol=TOLERANCE, atol=TOLERANCE
    )


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (7,), (3, 3), (64,)], ids=str)
def test_transposed_products_equal_those_of_rows(shape: tuple[int, ...]) -> None:
    x, matrix = (
        jax.random.normal(jax.random.key(0), (*shape, 24)),
        jax.random.normal(jax.random.key(1), (11, 24)),
    )
    y = few_rows.transposed_product(x, matrix)
    np.testing.assert_allclose(y, x @ matrix.T, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(("backend", "rewritten"), [("cpu", True), ("gpu", False), ("tpu", False)])
def test_only_cpus_have_forms_of_their_own(backend: str, rewritten: bool) -> None:
    def both(a: jax.Array, b: jax.Array, x: jax.Array, matrix: jax.Array) -> tuple:
        return few_rows.stacked_products(a, b), few_rows.transposed_product(x, matrix)

    shapes = (2, 3, 8), (2, 8, 5), (3, 8), (5, 8)
    with dispatch.use_backend(backend, jax.devices()[0]):
        program = str(jax.make_jaxpr(both)(*map(jnp.ones, shapes)))
    assert ("concatenate" in program) == rewritten
    assert ("layout_constraint" in program) == rewritten
