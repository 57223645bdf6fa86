"""Tests the model class of lm-evaluation-harness on local tasks, against its own class `hf`."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_decoder import TEXT, write_decoder

import brt
from brt import api
from brt.errors import BrtError, ConfigError, DataError

# Tasks of each kind that lm_eval has, by name: the output type, and further lines of their files.
TASKS = {
    "choice": ("multiple_choice", "doc_to_text: '{{question}}'\ndoc_to_choice: '{{choices}}'\n"
        "doc_to_target: '{{answer}}'\nmetric_list: [{metric: acc}, {metric: acc_norm}]\n"),
    "books": ("loglikelihood_rolling", "doc_to_text: ''\ndoc_to_target: '{{text}}'\n"
        "metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]\n"),
    "writing": ("generate_until", "doc_to_text: '{{question}}'\ndoc_to_target: '{{written}}'\n"
        "generation_kwargs: {until: [\"\\n\", \"tt\"], max_gen_toks: 12}\n"
        "metric_list: [{metric: exact_match}]\n"),
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>it{% endif %}"
)
QUESTIONS = [
    {"question": TEXT[:150] + "It was the ", "choices": ["best", "worst of times", "age\n"],
     "answer": 1, "text": TEXT[:230], "written": ""},
    {"question": "It was", "choices": ["It was", " the worst, it was", " x"], "answer": 0,
     "text": "A text.", "written": "a"},
]  # fmt: skip


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> api.Model:
    place = tmp_path_factory.mktemp("lm_eval") / "tiny"
    write_decoder(place)
    # Blocks of eight tokens, so that the texts end several of them.
    return brt.load(place, bindings={"Window.block": 8, "Model.window": 32, "Window.sinks": 2})


@pytest.mark.slow
def test_continuations_of_a_memory_have_the_bits_of_the_whole_text(tiny: api.Model) -> None:
    """The memory is read once and stays as it is, also where a window and blocks end."""
    context = TEXT[:100]
    memory = tiny.read(context)
    before = memory.logits.copy()
    texts = [" of times, it was the worst of times; it was", " x", " a\n"]
    found = tiny.continuation_bits(texts, memory, batch_size=2)
    for text, (bits, _) in zip(texts, found, strict=True):
        whole = tiny.token_bits(context + text)
        np.testing.assert_allclose(bits, whole[-len(bits) :], atol=1e-4)
    np.testing.assert_array_equal(memory.logits, before)


@pytest.mark.slow
def test_the_most_probable_continuation_is_known(tiny: api.Model) -> None:
    ids = []
    for _ in range(3):
        ids.append(int(np.argmax(tiny.read(np.array([0, 5, *ids])).logits)))
    other = [*ids[:2], ids[2] ^ 1]
    memory = tiny.read(np.array([0, 5]))
    greedy, wrong = tiny.continuation_bits([np.array(ids), np.array(other)], memory)
    assert greedy[1].tolist() == [True, True, True] and wrong[1].tolist() == [True, True, False]


@pytest.mark.slow
def test_a_text_without_bos_is_read_without_it(tiny: api.Model) -> None:
    first = tiny.read(np.array([7, 8, 9]), bos=False)
    np.testing.assert_array_equal(first.logits, tiny.read(np.array([7, 8, 9]), bos=False).logits)
    assert np.abs(first.logits - tiny.read(np.array([7, 8, 9])).logits).max() > 1e-3
    assert first.tokens == tiny.read(np.array([0, 8, 9])).tokens


def test_bad_continuations_are_refused(tiny: api.Model) -> None:
    memory = tiny.read("It was")
    for texts, message in (([""], "has no tokens"), ([np.array([300])], "must be in 0 to 299")):
        with pytest.raises(DataError, match=message):
            tiny.continuation_bits(texts, memory)


def test_without_lm_eval_the_command_says_what_to_install() -> None:
    code = "import sys; sys.modules['lm_eval'] = None; import runpy; sys.argv[1:] = ['ls', 'tasks']"
    code += "; runpy.run_module('brt.lm_eval', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == ConfigError.exit_code
    assert done.stderr.splitlines()[-1].endswith("pip install 'brt[lm_eval]' installs it")


@pytest.fixture
def harness(tiny: api.Model) -> Callable[..., Any]:
    """Returns the class of lm_eval with the directory of a tiny model as its default."""
    pytest.importorskip("lm_eval")
    from brt.lm_eval_model import BrtLM

    return lambda **arguments: BrtLM(**{"workdir": str(tiny.workdir), **arguments})


@pytest.mark.slow  # Imports lm_eval, which is optional.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workdir": ""}, "needs workdir=DIR"),
        ({"windw": 3}, "no argument windw; did you mean 'window'"),
        ({"Window.blok": 3}, "Window.blok"),
        ({"batch_size": "auto"}, "--batch_size=auto must be a number"),
        ({"step": 3}, "has no steps"),
        ({"add_bos_token": "maybe"}, "must be True or False"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: dict[str, Any], message: str, harness: Callable[..., Any]
) -> None:
    with pytest.raises(BrtError, match=message):
        harness(**arguments)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_models_that_continue_no_texts_are_refused(
    harness: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api.Model, "continues", False)
    with pytest.raises(ConfigError, match="does not continue texts; name a language model"):
        harness()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_bad_requests_are_refused(harness: Callable[..., Any]) -> None:
    from lm_eval.api.instance import Instance

    def ask(kind: str, *arguments: Any) -> None:
        getattr(lm, kind)([Instance(kind, {}, arguments, 0)], disable_tqdm=True)

    lm = harness()
    with pytest.raises(DataError, match="empty continuation"):
        ask("loglikelihood", "It was", "")
    with pytest.raises(ConfigError, match="does not know num_beams of --gen_kwargs"):
        ask("generate_until", "It was", {"until": [], "num_beams": 4})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bos", [False, True])
def test_what_contexts_share_is_read_once(
    bos: bool, harness: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = harness(add_bos_token=bos, **{"Window.block": 8, "Model.window": 32, "Window.sinks": 2})
    first, read, lengths = list(range(3, 43)), lm.model.read, []
    contexts = [[], [9], [*first, 50, 51], [*first[:20], 60], first, [*first, 50, 52], [70] * 12]
    requests = [(("", ""), context, [5, 6]) for context in contexts]

    def counted(tokens: np.ndarray, *given: Any, **more: Any) -> Any:
        lengths.append(len(tokens))
        return read(tokens, *given, **more)

    monkeypatch.setattr(lm.model, "read", counted)
    found = lm._loglikelihood_tokens(requests, disable_tqdm=True)
    for (_, context, row), (nats, _) in zip(requests, found, strict=True):
        memory = read(np.array(context, np.int32), bos=bos or not context)
        ((bits, _),) = lm.model.continuation_bits([np.array(row)], memory)
        assert nats == pytest.approx(-bits.sum() * np.log(2), abs=1e-4)
    # The blocks before token 40 (39 of them with BOS) are read once; of 158 tokens remain:
    assert sum(lengths) == (39 + 3 + 3 + 1 + 6 + 1 + 12 if bos else 40 + 2 + 2 + 5 + 1 + 12)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bos", [False, True])
def test_plain_models_have_the_results_of_the_class_hf(bos: bool, tmp_path: Path) -> None:
    """With a window of the whole context: prompts without BOS, and conversations with BOS."""
    for name in ("torch", "transformers", "lm_eval", "datasets"):
        pytest.importorskip(name)
    write_llama(tmp_path / "model", bos)
    write_tasks(tmp_path)
    flags = ["--batch_size", "4"] + ["--apply_chat_template"] * bos
    theirs = results(tmp_path, "hf", f"pretrained={tmp_path}/model,dtype=float32", *flags)
    arguments = f"workdir={tmp_path}/model,window=128,add_bos_token={bos}"
    ours = results(tmp_path, "brt", arguments, *flags)
    # The class hf reads BOS twice before a whole document whose tokenizer adds it.
    tasks = {"choice", "writing"} if bos else TASKS.keys()
    for task in tasks:
        assert len(ours[task]) == len(theirs[task]) == len(QUESTIONS)
        for own, other in zip(ours[task], theirs[task], strict=True):
            if task == "writing":  # brt keeps the bytes of an unfinished character back.
                assert own[0].rstrip("\ufffd") == other[0].rstrip("\ufffd")
            else:
                np.testing.assert_allclose(numbers(own), numbers(other), atol=1e-4)
    model = brt.load(tmp_path / "model", bindings={"Model.window": 128})
    for question, found in zip(QUESTIONS, ours["books"], strict=True):
        nats = np.log(2) * model.token_bits(question["text"]).sum()
        assert numbers(found) == pytest.approx([-nats], abs=1e-4)


def numbers(answer: list) -> np.ndarray:
    """Returns the log-likelihoods in an answer, and 1 or 0 for what is or is not greedy."""
    flat = np.ravel(np.array(answer, str))
    return np.array([float({"True": 1, "False": 0}.get(text, text)) for text in flat])


def write_llama(place: Path, bos: bool) -> None:
    """Writes a random Llama of transformers, whose tokenizer begins texts with BOS or does not."""
    import torch
    import transformers
    from tokenizers.processors import TemplateProcessing

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=280, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        bos_token_id=0, eos_token_id=2, pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(place)
    write_decoder(place.parent / "tiny")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(place.parent / "tiny/tokenizer.json"), bos_token="<|endoftext|>",
        eos_token="<|im_end|>", pad_token="<|endoftext|>",
    )  # fmt: skip
    if bos:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(place)


def write_tasks(place: Path) -> None:
    (place / "tasks").mkdir()
    data = place / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    for name, (kind, lines) in TASKS.items():
        (place / f"tasks/{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\noutput_type: {kind}\ntest_split: test\n"
            f"dataset_kwargs: {{data_files: {{test: {data}}}}}\n{lines}"
        )


def results(place: Path, model: str, arguments: str, *flags: str) -> dict[str, list]:
    """Returns the answers of a model to each question of each task, which the command writes."""
    done = subprocess.run(
        [
            sys.executable, "-m", "brt.lm_eval", "--model", model, "--model_args", arguments,
            "--tasks", ",".join(TASKS), "--include_path", f"{place}/tasks", "--log_samples",
            "--output_path", f"{place}/{model}", "--device", "cpu", *flags,
        ],
        capture_output=True, text=True, env=os.environ | {"HF_HOME": f"{place}/hf_home"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = {}
    for task in TASKS:
        (file,) = (place / model).rglob(f"samples_{task}_*.jsonl")
        found[task] = [json.loads(line)["filtered_resps"] for line in file.open()]
    return found
