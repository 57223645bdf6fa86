"""Tests that `brt.check_layers` accepts a correct kind, and names the rule that a wrong kind
breaks.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
import pytest
import user_kinds
from user_kinds import my_layers, token_recurrence

import brt
from brt.config import Model
from brt.config.fields import adaptable
from brt.config.kinds import KindSection
from brt.errors import ConfigError
from brt.layers import kinds
from brt.layers.basic import ONES, parameter
from brt.layers.state import Given, LayerOutput, state_array

Layer, State = token_recurrence.DecayLayer, token_recurrence.DecayState
MODEL = Model(
    layers=1, model_dim=16, heads=2, head_dim=8, mlp_dim=16, window=4, dtype="float32",
    kinds=(token_recurrence.Decay(layers=(0,)),),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    with user_kinds.registered():
        yield


@pytest.mark.slow_cases("Decay", "Echo")
@pytest.mark.parametrize("kind", [token_recurrence.Decay, my_layers.Echo], ids=lambda x: x.__name__)
def test_correct_kinds_are_accepted(kind: type[KindSection]) -> None:
    brt.check_layers(dataclasses.replace(MODEL, kinds=(kind(layers=(0,)),)))


def wrong(method: str, change: Callable[[LayerOutput, Any], Any]) -> type[Layer]:
    """Returns a layer whose `method` returns what `change` makes of its output and its input x."""

    def changed(self: Layer, x: Any, given: Given) -> Any:
        return change(getattr(Layer, method)(self, x, given), x)

    return type("Wrong", (Layer,), {method: changed})


def with_zeros(output: LayerOutput, x: Any) -> LayerOutput:
    return output._replace(state=State(jnp.zeros_like(output.state.total)))


def with_later_tokens(output: LayerOutput, x: Any) -> LayerOutput:
    blocks = x.reshape(len(x), -1, MODEL.block_length, x.shape[-1])
    means = jnp.broadcast_to(blocks.mean(axis=2, keepdims=True), blocks.shape)
    return output._replace(x=output.x + means.reshape(x.shape))


class ReadsEarlierDocuments(Layer):
    """A wrong layer that ignores the starts of documents."""

    def __call__(self, x: Any, given: Given) -> LayerOutput:
        nowhere = given.document_start & False
        return super().__call__(x, given._replace(document_start=nowhere))


class ReadsOtherRows(wrong("__call__", lambda y, x: y._replace(x=y.x + x[::-1]))):
    """A wrong layer in which rows of the batch read each other."""

    def decode_step(self, x: Any, given: Given) -> LayerOutput:
        y = super().decode_step(x, given)
        return y._replace(x=y.x + x[::-1])


class ReadsNextToken(Layer):
    """A wrong layer in which a token reads the token after it."""

    def __call__(self, x: Any, given: Given) -> LayerOutput:
        return super().__call__(jnp.roll(x, -1, axis=1), given)


class NamesOneAxis(Layer):
    """A wrong layer that names one axis of a matrix."""

    def setup(self) -> None:
        width = self.model.model_dim
        self.weight = parameter(self, "weight", (width, width), ("embed",), ONES)


class NamesNoAxis(Layer):
    """A wrong layer with a parameter whose axis has a name that does not exist."""

    def setup(self) -> None:
        self.weight = parameter(self, "weight", (self.model.model_dim,), ("width",), ONES)


ONE_CALL = "two calls of __call__, one after the other, must return what one call"
TOKEN_BY_TOKEN = "begin_block, decode_step and end_block together must return what"


def described(*axes: str | None) -> Callable[[Model], State]:
    """Returns a function that describes a state whose array has axes of these names."""
    return lambda model: State(state_array((16,), axes))


@pytest.mark.slow_cases("changes[0256]-*", "changes4-*", "changes7-*")
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"module": wrong("__call__", with_zeros)}, ONE_CALL),
        ({"module": ReadsNextToken}, "__call__ must not let a token read a later one"),
        ({"module": wrong("__call__", with_later_tokens)}, "must not let a token read a later one"),
        ({"module": ReadsOtherRows}, "__call__ must not let a row of the batch read another one"),
        ({"module": ReadsEarlierDocuments}, "must not read anything from before a block with"),
        ({"module": wrong("decode_step", lambda y, x: y._replace(x=y.x + 0.1 * x**2))},
         TOKEN_BY_TOKEN),
        ({"module": wrong("end_block", with_zeros)}, TOKEN_BY_TOKEN),
        ({"reads_chunks": True}, r"decode_step must read two tokens .*at token 1 of"),
        ({"module": NamesOneAxis},
         r"parameter 'weight' of NamesOneAxis has the shape \(16, 16\) and the"),
        ({"module": NamesNoAxis}, "'weight' of NamesNoAxis has an axis named 'width'; the names"),
        ({"module": wrong("end_block", lambda y, x: LayerOutput(x, None))},
         r"end_block returned NoneType in place of state, which was DecayState\(tot"),
        ({"module": wrong("__call__", lambda y, x: tuple(y[:2]))},
         "Wrong.__call__ returned a tuple; it must return a brt.layers"),
        ({"module": wrong("__call__", lambda y, x: y._replace(x=y.x.astype(jnp.float32)))},
         r"got x as bfloat16\[.* and returned float32\[.*astype\(bfloat16\)"),
        ({"module": wrong("end_block", lambda y, x: LayerOutput(
            x, State(y.state.total.astype(jnp.int32))))},
         r"Wrong.end_block got state.total as .* int32\["),
        ({"parts": {"state": ("sums",)}}, "counts a field 'sums' to the part 'state', but its"),
        ({"state": described("batch")}, "of the kind 'decay' has an axis named 'batch'; the na"),
        ({"state": described("embed", None)},
         r"the shape \(16,\) with the names of axes \('embed', None\); give e"),
        ({"state": lambda model: State(jnp.zeros((1, 16)))},
         "describe every array by brt.layers.state.state_array"),
    ],
)  # fmt: skip
def test_the_check_names_what_is_wrong_with_a_kind(changes: dict, sentence: str) -> None:
    kinds.KINDS["decay"] = token_recurrence.DECAY._replace(**changes)
    with pytest.raises((AssertionError, ConfigError), match=sentence):
        brt.check_layers(MODEL)


class HasNoBeginning(nn.Module):
    """A wrong layer without the method `begin_block`."""

    model: Model
    training: bool = False
    kernels: Any = None

    def __call__(self, x: Any, given: Given) -> LayerOutput:
        return LayerOutput(x, ())


class HasOtherFields(nn.Module):
    """A wrong layer that brt cannot create, because it lacks the field `kernels`."""

    model: Model
    training: bool = False


class AcceptsNothing(Layer):
    """A wrong layer whose call refuses the arguments that brt passes to every kind."""

    def __call__(self, x: Any) -> LayerOutput:
        return LayerOutput(x, ())


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainField(KindSection):
    kind: ClassVar[str] = "wrong"
    layers: tuple[int, ...] = adaptable(())
    width: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class WithoutKind(KindSection):
    layers: tuple[int, ...] = adaptable(())


@dataclasses.dataclass(frozen=True, kw_only=True)
class KindAsField(KindSection):
    kind: str = "wrong"  # type: ignore[misc]
    layers: tuple[int, ...] = adaptable(())


class WithoutDecorator(KindSection):
    kind: ClassVar[str] = "wrong"
    layers: tuple[int, ...] = ()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"parts": {"states": ("total",)}}, "has the part 'states'; the parts of a state are"),
        ({"section": None}, "the LayerKind 'wrong' has no section, so no layer can be of this"),
        ({"section": WithoutKind}, "add the class variable `kind: ClassVar\\[str\\] = 'wrong'`"),
        ({"section": PlainField}, "declares the field width of the section PlainField; write, for"),
        ({"section": KindAsField}, "KindAsField.kind is no setting; annotate it as a class varia"),
        ({"section": WithoutDecorator}, "has no field `layers`; decorate the class with @datacl"),
        ({"section": PlainField()}, "of the kind 'wrong' is PlainField.*; it must be a subclass"),
        ({"parts": {"state": "total"}}, r"as the fields of the part 'state'; write \('total',\), "),
        ({"module": Layer.__call__}, "it must be a subclass of flax.linen.Module"),
        ({"module": HasNoBeginning}, "HasNoBeginning of the kind 'wrong' has no method begin_bl"),
        ({"module": HasOtherFields}, "must begin with the fields model, training, kernels"),
        ({"module": AcceptsNothing}, r"declare it as __call__\(self, x, given\)"),
    ],
)
def test_a_kind_that_lacks_something_is_refused_when_it_is_registered(
    changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        kinds.register_kind("wrong", token_recurrence.DECAY._replace(**changes))
    assert "wrong" not in kinds.KINDS
