"""Tests that type checks that are built at the first call find the same errors as jaxtyping."""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from beartype.roar import BeartypeCallHintViolation

SOURCE = '''
import dataclasses
from typing import TYPE_CHECKING
from jaxtyping import Float, PyTree
from numpy import ndarray
if TYPE_CHECKING:
    from elsewhere import Unknown

def product(x: Float[ndarray, "A B"], y: Float[ndarray, "B C"]) -> Float[ndarray, "A C"]:
    """Multiplies."""
    return x @ y if len(x) < 5 else x

def adder(amount: int):
    def add(x: Float[ndarray, "A B"], again: int = 0) -> Float[ndarray, "A B"]:
        return add(x + amount, again - 1) if again else (x + amount)[: 4 - amount]
    return add

def leaves(tree: PyTree[ndarray]) -> None:
    return None

class Row:
    def total(self, x: Float[ndarray, "A"], *more: Float[ndarray, "A"]) -> float:
        return float(x.sum()) if len(x) < 4 else None
    def same(self, other: "Unknown") -> "Row | None":
        return other

@dataclasses.dataclass
class Named:
    name: str
'''


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Imports the module SOURCE with type checks, as the modules of brt are imported in tests."""
    from jaxtyping import install_import_hook

    place = tmp_path_factory.mktemp("modules")
    (place / "module_with_checks.py").write_text(SOURCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(place)
        with install_import_hook("module_with_checks", "beartype.beartype"):
            import module_with_checks  # type: ignore[import-not-found]

            yield module_with_checks
        del sys.modules["module_with_checks"]


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize("calls", [1, 2])
def test_arguments_and_results_of_every_kind_of_function_are_checked(
    checked: Any, calls: int
) -> None:
    row = checked.Row()
    right: list[Callable] = [
        lambda: checked.product(zeros(2, 3), zeros(3, 4)),
        lambda: checked.adder(0)(zeros(4, 3)),
        lambda: checked.adder(0)(zeros(4, 3), again=2),
        lambda: row.total(zeros(3), zeros(3)),
        lambda: row.same(row),
        lambda: checked.leaves({"a": zeros(1), "b": [zeros(2), {}]}),
        lambda: checked.Named("a"),
    ]
    refused: list[Callable] = [
        lambda: checked.product(zeros(2, 3), zeros(4, 3)),
        lambda: checked.product(zeros(5, 3), zeros(3, 4)),
        lambda: checked.product(zeros(2), zeros(3, 4)),
        lambda: checked.adder(0)(zeros(4)),
        lambda: checked.adder(1)(zeros(4, 3)),
        lambda: checked.adder("1"),
        lambda: row.total(zeros(3), zeros(2)),
        lambda: row.total(zeros(4)),
        lambda: row.same(3),
        lambda: checked.leaves({"a": zeros(1), "b": [1.0]}),
        lambda: checked.Named(1),
    ]
    for _ in range(calls):
        for call in right:
            call()
        for call in refused:
            with pytest.raises(BeartypeCallHintViolation):
                call()


def test_functions_of_one_statement_have_their_own_variables_and_defaults(checked: Any) -> None:
    one, two = checked.adder(1), checked.adder(2)
    assert one(zeros(3, 1)).max() == 1
    assert two(zeros(2, 1)).max() == 2
    assert one(zeros(3, 1), again=0).max() == 1


def test_a_function_keeps_its_name_and_text(checked: Any) -> None:
    assert checked.product.__name__ == "product" and checked.product.__doc__ == "Multiplies."


def test_functions_of_brt_are_checked() -> None:
    from brt.ops.reductions import sum_last

    with pytest.raises(BeartypeCallHintViolation):
        sum_last("no array")
