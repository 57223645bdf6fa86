"""Tests the Python API on a run that the training command made."""

import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import brt
from brt.errors import CheckpointError, ConfigError, DataError

from .conftest import Commands

BOOK = "the rain in spain stays mainly in the plain\n" * 3


@pytest.fixture(scope="module")
def model(trained: Path) -> brt.Model:
    return brt.load(trained)


def test_a_model_knows_its_run(model: brt.Model, trained: Path) -> None:
    assert (model.workdir, model.step, model.config.model.window) == (trained, 24, 8)
    assert brt.load(trained, step=16).step == 16
    assert brt.load(trained, bindings={"Sampling.top_k": 3}).config.sampling.top_k == 3


@pytest.mark.slow
def test_memories_are_gone_on_from_as_if_nothing_had_happened(
    model: brt.Model, tmp_path: Path
) -> None:
    whole = model.generate(BOOK, max_tokens=20, seed=1, temperature=1.0)
    assert whole and whole == model.generate(BOOK, max_tokens=20, seed=1, temperature=1.0)
    memory = model.read(BOOK[20:], model.read(BOOK[:20]))
    assert memory.tokens == len(BOOK) + 1 and memory.logits.shape == (256,)
    memory.save(tmp_path / "m.npz")
    before = np.array(memory.logits)
    for state in (memory, memory, model.load_memory(tmp_path / "m.npz")):
        assert model.generate(state=state, max_tokens=20, seed=1, temperature=1.0) == whole
    np.testing.assert_array_equal(memory.logits, before)
    ids = model.read(np.frombuffer(BOOK.encode(), np.uint8))
    np.testing.assert_allclose(ids.logits, memory.logits, atol=1e-4)


@pytest.mark.slow
def test_a_memory_of_another_model_is_refused(model: brt.Model, tmp_path: Path) -> None:
    path = tmp_path / "m.npz"
    model.read("the rain").save(path)
    with np.load(path) as file:
        arrays = dict(file)
    identity = json.loads(str(arrays["identity"])) | {"Recurrence.gate": "gru"}
    np.savez(path, **arrays | {"identity": np.array(json.dumps(identity))})
    with pytest.raises(DataError, match="model: Recurrence.gate was gru and is fixed$"):
        model.load_memory(path)


@pytest.mark.slow  # This test runs commands as processes; quick tests cover what commands call.
def test_a_memory_of_a_command_is_one_of_python(
    model: brt.Model, commands: Commands, trained: Path, tmp_path: Path
) -> None:
    text = model.stream("the rain", max_tokens=7)
    written = "".join(text)
    memory = text.memory
    memory.save(tmp_path / "s.npz")
    flags = [f"--load_state={tmp_path}/s.npz", "--max_tokens=5"]
    done = commands.run("generate", f"--workdir={trained}", *flags)
    assert done.out == model.generate(state=memory, max_tokens=5) + "\n"
    whole = commands.run("generate", f"--workdir={trained}", "--prompt=the rain", "--max_tokens=12")
    assert whole.out == "the rain" + written + done.out


@pytest.mark.slow
def test_prompts_of_a_file_have_the_texts_of_python(
    model: brt.Model, commands: Commands, trained: Path, tmp_path: Path
) -> None:
    rows = [{"prompt": BOOK, "id": 1}, {"prompt": "the rain"}, {"prompt": "x" * 40, "id": 3}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    how = {"max_tokens": 30, "temperature": 1.0, "seed": 2}
    flags = [f"--{name}={value}" for name, value in how.items()]
    done = commands.run("generate", f"--workdir={trained}", f"--prompts={tmp_path}/p.jsonl", *flags)
    expected = [{**row, "text": model.generate(row["prompt"], **how)} for row in rows]
    assert [json.loads(line) for line in done.out.split("\n")[:-1]] == expected
    assert model.generate([row["prompt"] for row in rows], **how) == [
        row["text"] for row in expected
    ]


@pytest.mark.slow
def test_bits_of_a_document_are_those_of_evaluation(model: brt.Model) -> None:
    figures = model.evaluate("validation")
    documents = sorted(Path(model.config.data.validation[0]).iterdir())
    texts = [path.read_text() for path in documents]
    bits = [model.token_bits(text) for text in texts]
    assert [len(each) for each in bits] == [len(text) for text in texts]
    assert sum(each.sum() for each in bits) == pytest.approx(figures["bits"], rel=1e-5)
    assert model.bits_per_byte(texts[1]) == pytest.approx(bits[1].mean(), rel=1e-5)


def test_what_cannot_be_done_is_said_in_a_sentence(
    model: brt.Model, trained: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="there is no directory no-run; name the directory"):
        brt.load("no-run")
    with pytest.raises(CheckpointError, match="has no checkpoint of step 7"):
        brt.load(trained, step=7)
    with pytest.raises(ConfigError, match="no field 'Model.layer'; did you mean 'Model.layers'"):
        brt.config_from_gin((), {"Model.layer": 2})
    for given, message in (
        ({"beams": 2, "top_p": 0.5}, "beams=2 searches for the most probable text, top_p=0.5 sam"),
        ({"beams": 0}, "beams=0 must be above 0"),
        ({"max_tokens": -1}, "max_tokens=-1 must not be negative"),
        ({"temperature": -1.0}, "Sampling.temperature = -1.0 must not be negative"),
    ):
        with pytest.raises(ConfigError, match=message):
            model.generate("x", **given)
    for call, message in (
        (lambda: model.generate(), "the prompt is empty; give some text, or a state"),
        (lambda: model.bits_per_byte(""), "the text is empty"),
        (lambda: model.read(np.array([3, 256])), "token ids must be in 0 to 255"),
        (lambda: model.load_memory(tmp_path / "no.npz"), "there is no state file"),
        (lambda: model.read("x", brt.load(trained, step=16).read("x")), "belongs to another model"),
    ):
        with pytest.raises(DataError, match=message):
            call()


@pytest.mark.slow
def test_two_texts_at_a_time_are_not_mixed_up(model: brt.Model) -> None:
    first = model.stream("a", max_tokens=40)
    next(first)
    model.read("b")
    for late in (lambda: next(first), lambda: first.memory):
        with pytest.raises(ConfigError, match="read or generated another text meanwhile"):
            late()


def test_train_is_the_command_and_a_function(
    model: brt.Model, capsys: pytest.CaptureFixture[str]
) -> None:
    assert isinstance(brt.train, ModuleType) and brt.train.parser()
    assert brt.train(model.config, model.workdir).step == 24
    assert "step 24 of 24 is done already" in capsys.readouterr().err
