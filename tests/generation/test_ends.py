"""Tests where generated texts end: at end tokens, at stop strings, and between two parts."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny_decoder import write_chain

import brt
from brt.api import Model
from brt.config import Sampling
from brt.errors import ConfigError, DataError
from brt.generation.memory import NO_TOKEN
from brt.generation.session import Session

GREEDY = {"temperature": 0.0}
# "d" is followed by "o", "o" by "t", and so on: the text after "x" is "dot é", and then an end.
CHAIN = {
    "": "d", "d": "o", "o": "t", "t": "Ġ", "Ġ": "Ã", "Ã": "©", "©": "<|im_start|>",
    "<|im_start|>": "a", "a": "<|im_end|>", "<|im_end|>": "d",
}  # fmt: skip
TEXT = "dot éa"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """Yields a model that writes the text of `CHAIN`, three tokens at a time."""
    place: Path = tmp_path_factory.mktemp("chain") / "decoder"
    write_chain(place, CHAIN, end_ids=(0, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("brt.generation.session.CHUNK", 3)
        yield brt.load(place)


def ids(model: Model, *names: str) -> list[int]:
    """Returns the ids of tokens of `CHAIN`."""
    return [model.tokenizer._tokenizer.token_to_id(name) for name in names]


@pytest.mark.slow_cases("{'beams': 2}", "*1}")
@pytest.mark.parametrize("how", [GREEDY, {"beams": 1}, {"beams": 2}], ids=str)
def test_every_kind_of_text_ends_at_an_end_token(model: Model, how: dict) -> None:
    """The end token is the last of three tokens that are written at a time."""
    assert model.generate("x", max_tokens=30, **how) == TEXT
    text = model.stream("x", max_tokens=30, **how)
    assert "".join(text) == TEXT
    memory = text.memory
    # The memory has BOS, the prompt, the eight tokens of the text, and the end token.
    assert memory.tokens == 2 + 8 + 1
    assert model.generate(state=memory, max_tokens=5, **how) == "", "nothing follows an end"
    assert model.generate("x", state=memory, max_tokens=5, **how) == "dot "


@pytest.mark.slow_cases("(5, 30)-*beams*")
@pytest.mark.parametrize(
    ("counts", "how"),
    [((5, 30), GREEDY), ((1, 4, 1, 1, 20), GREEDY), ((5, 30), {"beams": 2})],
    ids=str,
)
def test_a_text_in_parts_is_the_text_at_once(
    model: Model, how: dict, counts: tuple[int, ...], tmp_path: Path
) -> None:
    """Some parts end within the two bytes of a character, whose first byte the memory keeps."""
    memory, parts = model.read("x"), []
    for count in counts:
        text = model.stream(state=memory, max_tokens=count, **how)
        parts.append("".join(text))
        text.memory.save(tmp_path / "memory.npz")
        memory = model.load_memory(tmp_path / "memory.npz")
    assert "".join(parts) == TEXT and "\ufffd" not in "".join(parts)


def test_bytes_that_were_read_belong_to_the_first_character(model: Model) -> None:
    memory = model.read(np.array(ids(model, "Ã")))
    assert model.generate(state=memory, max_tokens=1, **GREEDY) == "é"
    assert model.generate("x", state=memory, max_tokens=2, **GREEDY) == "do", "never finished"


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ("ot", "d"), ("t é", "do"), (["zz", "a"], "dot é"), (["ot é", "t"], "do"), ("éa!", TEXT),
        ("é", "dot "), ("dot", ""),
    ],
)  # fmt: skip
@pytest.mark.parametrize("how", [GREEDY, {"beams": 2}], ids=str)
def test_a_text_ends_before_a_stop_string_and_so_does_its_memory(
    model: Model, stop: str | list[str], expected: str, how: dict
) -> None:
    text = model.stream("x", max_tokens=30, stop=stop, **how)
    shown = ""
    for piece in text:
        shown += piece
        assert expected.startswith(shown), "nothing is withdrawn"
    assert shown == expected
    if expected != TEXT:
        after = text.memory
        read = np.array(ids(model, *"xdot", "Ġ", "Ã", "©", "<|im_start|>")[: after.tokens - 1])
        assert model.tokenizer.decode_bytes(read).decode() == "x" + expected
        np.testing.assert_allclose(after.logits, model.read(read).logits, atol=1e-4)


@pytest.mark.slow_cases("*beams*", "*temperature': 9*", "{'temperature': 0.0}")
@pytest.mark.parametrize(
    "how",
    [
        GREEDY, GREEDY | {"stop": ["ot é", "t"]}, GREEDY | {"max_tokens": 2}, {"beams": 2},
        {"temperature": 9.0, "seed": 3, "top_p": 0.9},
    ],
    ids=str,
)  # fmt: skip
def test_texts_of_several_prompts_are_those_of_each_alone(
    model: Model, how: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The five prompts are three groups of at most two, of which the last has a prompt less."""
    monkeypatch.setattr("brt.tasks.language_modeling.writer.LANES", 2)
    prompts, how = ["x", "d", "yo " * 30 + "o", "Ã", "t"], {"max_tokens": 30} | how
    alone = [model.generate(prompt, **how) for prompt in prompts]
    assert model.generate(prompts, **how) == alone
    if how == {"max_tokens": 30} | GREEDY:
        assert alone == [TEXT, "ot éa", "t éa", TEXT, " éa"]


def test_several_prompts_follow_the_same_state(model: Model) -> None:
    state = model.read(np.array(ids(model, "x", "Ã")))
    prompts = ["d", "o"]
    alone = [model.generate(prompt, state=state, max_tokens=2, **GREEDY) for prompt in prompts]
    assert model.generate(prompts, state=state, max_tokens=2, **GREEDY) == alone == ["ot", "t "]
    assert model.generate([]) == []
    texts = model.generate_each(prompts, max_tokens=2, **GREEDY)
    assert next(texts) == "ot"
    model.read("x")
    with pytest.raises(ConfigError, match="read or generated another text meanwhile"):
        next(texts)
    with pytest.raises(DataError, match=r"^prompts\[1\] is empty; give some text"):
        model.generate(["x", ""])


def test_special_tokens_are_read_from_prompts_on_request_only(model: Model) -> None:
    assert model.generate("x<|im_start|>", max_tokens=9, special_tokens=True, **GREEDY) == "a"
    assert model.generate("x<|im_start|>", max_tokens=3, **GREEDY) == "dot"
    read = model.read("x<|im_end|>y<|im_start|>", special_tokens=True)
    expected = ids(model, "x", "<|im_end|>", "y", "<|im_start|>")
    assert read.tokens == 1 + len(expected)
    np.testing.assert_array_equal(read.logits, model.read(np.array(expected)).logits)
    name = next(n for n, i in model.tokenizer.special_ids.items() if i == model.tokenizer.bos_id)
    twice = model.read(f"{name}x", special_tokens=True)
    assert twice.tokens == model.read("x").tokens == 2, "BOS is read once"


def test_what_cannot_end_a_text_is_refused(model: Model) -> None:
    with pytest.raises(ConfigError, match=r"^stop= has an empty string"):
        model.generate("x", stop=["a", ""])


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [1, 5])
def test_every_row_ends_by_itself(model: Model, lanes: int) -> None:
    """A row has the tokens that it has without end tokens, up to the first of these tokens, also if
    it is written in parts. Almost random tokens are sampled.
    """
    ends, key, sampling = tuple(range(0, 300, 12)), jax.random.key(3), Sampling(temperature=50.0)

    def session(end_ids: tuple[int, ...]) -> Session:
        own = dataclasses.replace(model.config.model, end_ids=end_ids)
        config = dataclasses.replace(model.config, model=own)
        return Session(config, model._saved.variables, bos_id=1, lanes=lanes)

    def written(session: Session, *counts: int) -> np.ndarray:
        session.forget()
        pieces = [piece for count in counts for piece in session.write(count, sampling, key)]
        return np.concatenate(pieces, axis=1)

    ending = session(ends)
    endless, whole, parts = written(session(()), 40), written(ending, 40), written(ending, 3, 9, 28)
    np.testing.assert_array_equal(parts, whole)
    for row, long in zip(whole, endless, strict=True):
        length = int(np.flatnonzero(np.isin(long, ends))[0]) + 1
        np.testing.assert_array_equal(row[row != NO_TOKEN], long[:length])
        assert np.all(row[length:] == NO_TOKEN)


def test_a_conversation_is_read_as_its_template_says(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token <|im_start|> of the template is followed by "a"; its name in a message is text."""
    template = b"{% for m in messages %}{{ m.role + m.content }}<|im_start|>{% endfor %}"
    monkeypatch.setattr(model.tokenizer, "beside", {"chat_template.jinja": template})
    chat = [{"role": "user", "content": "<|im_start|>"}]
    text = model.stream(chat=chat, max_tokens=9, **GREEDY)
    assert "".join(text) == "a"
    # The name is divided after its first character. Besides, there are BOS, the token of the
    # template, the "a", and the end token.
    message = [*map(model.tokenizer.encode, ("user<", "|im_start|>"))]
    assert text.memory.tokens == sum(map(len, message)) + 4
    for wrong in ({"prompt": "x"}, {"state": model.read("x")}):
        with pytest.raises(ConfigError, match="whole conversation"):
            model.generate(chat=chat, **wrong)
