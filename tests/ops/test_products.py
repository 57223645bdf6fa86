import ast
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt.ops import dispatch, products
from brt.ops.products import matmul_nn, matmul_nt, matmul_tn

LEAD, ROWS, COLUMNS, WIDTH = (2, 3), 5, 7, 4
CASES = {
    "matmul_nt": (matmul_nt, "...mk,...nk->...mn", (ROWS, WIDTH), (COLUMNS, WIDTH)),
    "matmul_nn": (matmul_nn, "...mn,...nk->...mk", (ROWS, COLUMNS), (COLUMNS, WIDTH)),
    "matmul_tn": (matmul_tn, "...nm,...nk->...mk", (COLUMNS, ROWS), (COLUMNS, WIDTH)),
}


@pytest.mark.parametrize(("product", "spec", "left", "right"), CASES.values(), ids=CASES)
def test_products_and_their_gradients_are_those_of_einsum(
    product: Callable, spec: str, left: tuple[int, ...], right: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=(*LEAD, *shape)) for shape in (left, right))
    expected = np.einsum(spec, a, b)
    g = rng.normal(size=expected.shape)
    a_axes, b_axes, y_axes = spec.replace(",", " ").replace("->", " ").split()
    expected_a = np.einsum(f"{y_axes},{b_axes}->{a_axes}", g, b)
    expected_b = np.einsum(f"{y_axes},{a_axes}->{b_axes}", g, a)

    @jax.jit
    def both(a: jax.Array, b: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
        y, backward = jax.vjp(product, a, b)
        return y, *backward(g)

    y, d_a, d_b = both(*(x.astype(np.float32) for x in (a, b, g)))
    for actual, exact in ((y, expected), (d_a, expected_a), (d_b, expected_b)):
        np.testing.assert_allclose(actual, exact, rtol=1e-5, atol=1e-5)


def test_sums_of_bfloat16_are_in_float32() -> None:
    ones = jnp.ones((1, 4096), jnp.bfloat16)  # In bfloat16 the sum would stop at 256.
    y, backward = jax.vjp(matmul_nt, ones, ones)
    assert y.dtype == jnp.float32 and float(y[0, 0]) == 4096.0
    assert all(d.dtype == jnp.bfloat16 for d in backward(y))


def _specs() -> list[tuple[str, str]]:
    """Returns the einsum specification of every product with float32 sums in brt."""
    found = set()
    for file in (Path(__file__).resolve().parents[2] / "brt").rglob("*.py"):
        text = file.read_text()
        if "preferred_element_type" not in text and "einsum_float32" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            spec, widened = node.args[0], [keyword.arg for keyword in node.keywords]
            if (
                isinstance(spec, ast.Constant)
                and isinstance(spec.value, str)
                and (
                    "preferred_element_type" in widened
                    or ast.unparse(node.func) == "einsum_float32"
                )
            ):
                found.add((ast.unparse(node.func), spec.value))
    return sorted(found)


@pytest.mark.parametrize(("function", "spec"), _specs())
def test_each_product_by_itself_takes_bfloat16(function: str, spec: str) -> None:
    """Compiles each product alone. CPUs lack some products of bfloat16 numbers, which XLA may hide
    by converting the factors to float32 if there are other operations.
    """
    letters = spec.partition("->")[0].replace("...", "xy").split(",")
    a, b = (jnp.ones([6] * len(part), jnp.bfloat16) for part in letters)
    plain = partial(jnp.einsum, preferred_element_type=jnp.float32)
    product = products.einsum_float32 if function == "einsum_float32" else plain
    y = jax.jit(partial(product, spec))(a, b)
    assert y.dtype == jnp.float32 and (y == y.ravel()[0]).all()


ROUNDING = 1e-5  # of float32 sums over 24 products of magnitude 1


@pytest.mark.parametrize("rows", [1, 2, 4, 5])
def test_products_of_rows_equal_those_of_a_matrix(rows: int) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=shape).astype("float32") for shape in [(2, 3, rows, 24), (2, 3, 24, 7)])
    y = jax.jit(products.stacked_products)(a, b)
    np.testing.assert_allclose(y, a @ b, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("shape", [(1, 1), (7,), (3, 3), (64,)], ids=str)
def test_transposed_products_equal_those_of_rows(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    x, matrix = (rng.normal(size=(*rows, 24)).astype("float32") for rows in (shape, (11,)))
    y = jax.jit(products.transposed_product)(x, matrix)
    np.testing.assert_allclose(y, x @ matrix.T, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize(("backend", "rewritten"), [("cpu", True), ("gpu", False), ("tpu", False)])
def test_only_cpus_have_forms_of_their_own(backend: str, rewritten: bool) -> None:
    def both(a: jax.Array, b: jax.Array, x: jax.Array, matrix: jax.Array) -> tuple:
        return products.stacked_products(a, b), products.transposed_product(x, matrix)

    shapes = (2, 3, 8), (2, 8, 5), (3, 8), (5, 8)
    with dispatch.use_backend(backend, jax.devices()[0]):
        program = str(jax.make_jaxpr(both)(*map(jnp.ones, shapes)))
    assert ("concatenate" in program) == rewritten
    assert ("layout_constraint" in program) == rewritten
