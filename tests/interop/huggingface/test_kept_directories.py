"""Tests that every file and key of a model's directory is used, given back, or named."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_decoder import TEXT
from tokenizers import processors

import brt
from brt import convert, train
from brt.data import tokenizer_training, tokenizers
from brt.errors import CheckpointError
from brt.interop.huggingface import files
from brt.interop.huggingface.causal import config, reading
from brt.interop.huggingface.causal.config import WindowChoice
from brt.interop.huggingface.encoder_decoder import EncoderDecoder
from brt.interop.huggingface.roberta import EncoderWithHead

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{m['role']}}\n{{m['content']}}<|im_end|>\n{% endfor %}"
)
SETTINGS: dict[str, dict[str, Any]] = {
    "tokenizer_config.json": {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "model_max_length": 64,
        "clean_up_tokenization_spaces": False, "chat_template": TEMPLATE,
    },
    "special_tokens_map.json": {"eos_token": {"content": "<|im_end|>", "lstrip": False}},
    "generation_config.json": {
        "bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": 0, "do_sample": True,
        "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.05,
    },
}  # fmt: skip
OTHERS = ("README.md", "consolidated.safetensors", "onnx/model.onnx")


@pytest.fixture(scope="module")
def hub(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a directory of a chat model with everything that is found in such directories."""
    place = shutil.copytree(base, tmp_path_factory.mktemp("hub") / "chat")
    for name, settings in SETTINGS.items():
        files.write_json(place / name, settings)
    described = files.read_json(place / "config.json")
    described |= {"pad_token_id": 0, "initializer_range": 0.02, "some_remark": 3}
    files.write_json(place / "config.json", described)
    (place / "additional_chat_templates").mkdir()
    (place / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    for name in OTHERS:
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text("something")
    return place


@pytest.fixture
def change(hub: Path, tmp_path: Path) -> Callable[..., Path]:
    """Returns a function that writes a directory without weights, with changed JSON files."""

    def write(tokenizer: Callable[[dict], Any] = lambda _: None, **changes: Any) -> Path:
        for path in tmp_path.iterdir():
            path.unlink()
        content = files.read_json(hub / "tokenizer.json")
        tokenizer(content)
        files.write_json(tmp_path / "tokenizer.json", content)
        described = files.read_json(hub / "config.json")
        for name, entries in {"config": {}, **changes}.items():
            before = described if name == "config" else {}
            files.write_json(tmp_path / f"{name}.json", before | entries)
        return tmp_path

    return write


def run(*flags: str) -> None:
    convert.main(convert.parser().parse_args(flags))


def json_files(directory: Path) -> dict[str, Any]:
    """Returns the contents of the JSON files of a directory but for the index of shards."""
    paths = (path for path in directory.glob("*.json") if path.name != files.INDEX)
    return {path.name: json.loads(path.read_text()) for path in paths}


def assert_given_back(before: Path, after: Path, *, own_code: bool) -> None:
    """Compares the settings of two directories; those of the layers differ in `own_code`."""
    theirs, ours = json_files(before), json_files(after)
    described, again = theirs.pop("config.json"), ours.pop("config.json")
    assert ours == theirs
    for name in () if own_code else described:
        assert again[name] == described[name], name
    kept = ("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "some_remark")
    assert {name: again[name] for name in kept} == {name: described[name] for name in kept}
    template = "additional_chat_templates/tools.jinja"
    assert (after / template).read_bytes() == (before / template).read_bytes()


@pytest.mark.parametrize("own_code", [False, True])
def test_a_directory_is_given_back(
    hub: Path, tmp_path: Path, capsys: pytest.CaptureFixture, own_code: bool
) -> None:
    window = ("--window=32", "--sinks=4") if own_code else ()
    run("--from=hf", str(hub), "--to=brt", str(tmp_path / "run"), *window)
    said = capsys.readouterr().out
    kept = {"additional_chat_templates", *json_files(hub), files.INDEX}
    for path in hub.iterdir():  # Everything else is read.
        assert path.name in kept or path.name.startswith("model-") or path.name in said
    assert "some_remark" in said and "repetition_penalty = 1.05" in said
    run("--from=brt", str(tmp_path / "run"), "--to=hf", str(tmp_path / "back"))
    offered = "--plain writes LlamaForCausalLM instead" in capsys.readouterr().out
    of_brt = files.read_json(tmp_path / "back/config.json")["model_type"] == "brt"
    assert offered == of_brt == own_code
    assert_given_back(hub, tmp_path / "back", own_code=own_code)


def test_settings_of_generation_that_the_own_code_lacks(
    hub: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    shutil.copytree(hub, tmp_path / "hub")
    path = tmp_path / "hub/generation_config.json"
    lost = {"prompt_lookup_num_tokens": 3, "guidance_scale": 1.5}
    files.write_json(path, SETTINGS["generation_config.json"] | lost | {"output_attentions": False})
    run("--from=hf", str(tmp_path / "hub"), "--to=brt", str(tmp_path / "run"), "--window=32")
    for plain in (True, False):
        capsys.readouterr()
        flags = ["--plain"] * plain
        run("--from=brt", str(tmp_path / "run"), "--to=hf", str(tmp_path / f"{plain}"), *flags)
        said = capsys.readouterr().out
        again = files.read_json(tmp_path / f"{plain}/generation_config.json")
        assert files.read_json(path) == again | ({} if plain else lost)
        for name, value in lost.items():
            assert (name in again) == plain and said.count(f"{name} = {value}") == (not plain)


@pytest.mark.parametrize("model", ["t5", "bart", "roberta"])
def test_other_directories_are_given_back(
    model: str, directory: Callable, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    hub, back = tmp_path / "hub", tmp_path / "back"
    shutil.copytree(directory(model), hub)
    for file, settings in SETTINGS.items():
        before = files.read_json(hub / file) if (hub / file).is_file() else {}
        files.write_json(hub / file, settings | before)
    described = files.read_json(hub / "config.json") | {"some_remark": 3, "use_cache": False}
    files.write_json(hub / "config.json", described)
    for file in ("merges.txt", "README.md", "additional_chat_templates/tools.jinja"):
        (hub / file).parent.mkdir(exist_ok=True)
        (hub / file).write_text("something")
    run("--from=hf", str(hub), "--to=brt", str(tmp_path / "ours"))
    said = capsys.readouterr().out
    for word in ("some_remark", "repetition_penalty = 1.05", "temperature = 0.6", "README.md"):
        assert said.count(word) == 1, word
    run("--from=brt", str(tmp_path / "ours"), "--to=hf", str(back))
    for file, wanted in json_files(hub).items():
        again = json_files(back)[file]
        lost = {key for key, value in wanted.items() if again.get(key) != value}
        assert lost <= {"transformers_version"}, (file, lost)
    left = {path.name for path in hub.iterdir()} - {path.name for path in back.iterdir()}
    assert left == {"README.md", "expected.npz"} and all(name in said for name in left)


@pytest.mark.slow
def test_training_and_training_on_keep_a_directory(hub: Path, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text(TEXT)
    settings = {
        "Data.train": str(tmp_path / "book.txt"), "Data.validation": (), "Data.test": (),
        "Training.segment_length": 64, "Training.batch_size": 2, "Training.steps": 1,
        "Training.sample_every": 0, "Model.window": 16, "Window.block": 16,
    }  # fmt: skip
    for number, start in enumerate((hub, tmp_path / "run0")):
        settings["Training.init_from"] = str(start)
        brt.train(brt.config_from_gin((), settings), tmp_path / f"run{number}")
    again = {**settings, "Training.steps": 2}
    flags = [f"--gin_bindings={name} = {value!r}" for name, value in again.items()]
    resumed = train.parser().parse_args([f"--workdir={tmp_path / 'run1'}", *flags])
    train.main(resumed)
    assert brt.load(tmp_path / "run1").step == 2
    run("--from=brt", str(tmp_path / "run1"), "--to=hf", str(tmp_path / "back"))
    assert_given_back(hub, tmp_path / "back", own_code=True)


def test_prepared_data_of_another_model_do_not_replace_the_files(hub: Path, tmp_path: Path) -> None:
    """Two models with the same tokenizer share prepared data, but not the settings of chats."""
    from brt.data import originals

    beside = originals.read(hub / "tokenizer.json")
    (tmp_path / "own").mkdir()
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / "own" / name).write_bytes((hub / name).read_bytes())
    one, other = (tokenizers.load(str(d / "tokenizer.json")) for d in (hub, tmp_path / "own"))
    assert one.fingerprint == other.fingerprint
    assert one.beside == beside != other.beside


def begins(piece: str, i: int) -> Callable[[dict], None]:
    """Returns a function that adds a post-processor, which puts a piece before each text."""
    template = processors.TemplateProcessing(
        single=f"{piece} $A", pair="$A $B", special_tokens=[(piece, i)]
    )
    state = json.loads(template.__getstate__())
    return lambda content: content.update(post_processor=state)


def rename(old: str, new: str) -> Callable[[dict], None]:
    def change(content: dict) -> None:
        for token in content["added_tokens"]:
            token["content"] = token["content"].replace(old, new)
        content["model"]["vocab"][new] = content["model"]["vocab"].pop(old)

    return change


NO_BOS = {"bos_token_id": None}
ADDS = {"tokenizer_config": {"add_bos_token": True}}
ADDS_NO = {"tokenizer_config": {"add_bos_token": False, "bos_token": "<|im_start|>"}}


@pytest.mark.parametrize(
    ("tokenizer", "changes", "bos", "said"),
    [
        (begins("<|im_end|>", 2), {"config": {"bos_token_id": 2}}, 2, ""),
        (begins("<|im_end|>", 2), {"config": {"bos_token_id": 1}}, 2, "contradicts config.json"),
        (rename("<|endoftext|>", "<begin>"), {"config": {"bos_token_id": 0}}, 0, ""),
        (rename("<|im_start|>", "<go>"), {"tokenizer_config": {"bos_token": "<go>"}}, 1, ""),
        (rename("<|im_start|>", "<s>"), {"config": {"bos_token_id": 0}}, 0, ""),
        (lambda _: None, {"config": NO_BOS, "generation_config": {"bos_token_id": 1}}, 1, ""),
        (lambda _: None, {"config": {**NO_BOS, "eos_token_id": 2}}, 2, "begin with the end token"),
        (lambda _: None, {"config": {"bos_token_id": 290, "eos_token_id": 2}}, 2, "= 290 is no"),
        (lambda _: None, {"config": {"bos_token_id": 50, "eos_token_id": 2}}, 2, "= 50 is no"),
        (begins("<|im_start|>", 1), ADDS, 1, ""),
        (lambda _: None, ADDS, 1, "contradicts the post-processor"),
        (begins("<|im_start|>", 1), ADDS_NO, 1, "contradicts the post-processor"),
        (lambda _: None, ADDS_NO, 1, "documents of brt begin with a BOS"),
    ],
)
def test_documents_begin_with_what_the_directory_says(
    change: Callable, tokenizer: Callable, changes: dict, bos: int, said: str
) -> None:
    decoder = reading.describe(change(tokenizer, **changes))
    assert decoder.tokenizer.bos_id == bos
    notes = " ".join(decoder.notes)
    assert said in notes and ("BOS" in notes or "bos_token" in notes) == bool(said)


def test_a_sentencepiece_model_begins_as_its_settings_say(tmp_path: Path) -> None:
    """transformers heeds `add_bos_token`, as there is no tokenizer.json; its default BOS is <s>."""
    path = tmp_path / "tokenizer.model"
    special = tokenizer_training.Special(unk_id=0, bos_id=1, eos_id=2, pad_id=-1)
    tokenizer_training.train_sentencepiece([[TEXT]], 300, path, special=special)
    files.write_json(tmp_path / "config.json", {"bos_token_id": 2})
    for settings, bos, said in (
        ({}, 2, ""),
        ({"add_bos_token": True}, 1, "BOS = '<s>' contradicts config.json"),
        ({"add_bos_token": True, "bos_token": "</s>"}, 2, ""),
        ({"add_bos_token": False, "bos_token": "</s>"}, 2, "begin with a BOS"),
        ({"add_eos_token": True}, 2, "no end token after a prompt"),
    ):
        files.write_json(tmp_path / "tokenizer_config.json", settings)
        tokenizer = tokenizers.load(str(path))
        notes = " ".join(tokenizer.notes)
        assert tokenizer.bos_id == bos and said in notes and bool(notes) == bool(said), settings


def test_other_beginnings_are_other_tokenizers(change: Callable) -> None:
    names = [
        tokenizers.load(str(change(config={"bos_token_id": i}) / "tokenizer.json")).fingerprint
        for i in range(3)
    ]
    assert len({*names}) == 3


def test_end_ids_that_the_tokenizer_lacks(change: Callable) -> None:
    decoder = reading.describe(change(config={"eos_token_id": [290, 2]}))
    assert decoder.model.end_ids == (2,) and any("290" in note for note in decoder.notes)
    with pytest.raises(CheckpointError, match="no text could end"):
        reading.describe(change(config={"eos_token_id": 290}))
    # The remedies of the message.
    assert reading.describe(change(generation_config={"eos_token_id": 2})).model.end_ids == (2,)
    named = change(config={"eos_token_id": 280}, added_tokens={"<end>": 280})
    assert reading.describe(named).model.end_ids == (280,)


@pytest.mark.parametrize("special", [False, True])
def test_added_tokens_belong_to_the_tokenizer(change: Callable, special: bool) -> None:
    token = {"content": "<user>", "special": special}
    place = change(tokenizer_config={"added_tokens_decoder": {"280": token}})
    tokenizer = reading.describe(place).tokenizer
    assert tokenizer.vocab_size == 281
    ids = tokenizer.encode("a <user> b")
    assert (280 in ids) != special and tokenizers.decode(tokenizer, ids) == "a <user> b"
    with pytest.raises(brt.errors.DataError, match="does not follow"):
        reading.describe(change(tokenizer_config={}, added_tokens={"<user>": 290}))


REMARKS: tuple[dict[str, Any], ...] = (
    {"unsloth_fixed": True}, {"_flash_attn_2_enabled": True}, {"_attn_implementation": "sdpa"},
    {"max_length": 20}, {"temperature": 0.9, "do_sample": True}, {"tokenizer_class": "X"},
    {"auto_map": {"AutoModelForCausalLM": "m.X"}}, {"id2label": {"0": "LABEL_0"}},
    {"repetition_penalty": 1.1}, {"_commit_hash": "abc"}, {"license": "mit"},
    {"neftune_noise_alpha": 5}, {"embd_pdrop": 0.1}, {"use_flash_attention": True},
    {"embedding_multiplier": 1.0}, {"sliding_window_size": None}, {"trained_by": ["a", "b"]},
)  # fmt: skip
PARTS: tuple[dict[str, Any], ...] = (
    {"residual_multiplier": 0.22}, {"logits_scaling": 8.0}, {"final_logit_softcapping": 30.0},
    {"no_rope_layers": [1, 0]}, {"num_local_experts": 8}, {"clip_qkv": 8.0}, {"use_qk_norm": True},
    {"use_parallel_residual": True}, {"kv_lora_rank": 16}, {"use_bidirectional_attention": True},
    {"attention_chunk_size": 64}, {"mamba_d_state": 8},
)  # fmt: skip
T5 = {
    "model_type": "t5", "vocab_size": 40, "d_model": 24, "d_kv": 4, "d_ff": 20, "num_layers": 2,
    "num_heads": 3, "n_positions": 512, "output_past": True,
}  # fmt: skip
ROBERTA = {
    "model_type": "roberta", "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "intermediate_size": 24,
}  # fmt: skip
READERS: dict[str, Callable[[dict, Path], Any]] = {
    "llama": lambda more, hub: config.read(
        files.read_json(hub / "config.json") | more, WindowChoice()
    )[0],
    "t5": lambda more, _: EncoderDecoder.from_theirs(T5 | more, {}, ()).model,
    "roberta": lambda more, _: EncoderWithHead.from_theirs(ROBERTA | more, {}, ()).model,
}


@pytest.mark.parametrize("family", READERS)
def test_keys_that_change_nothing_are_ignored(hub: Path, family: str) -> None:
    plain = READERS[family]({}, hub)
    for remark in REMARKS:
        if family != "roberta" or "id2label" not in remark:  # RoBERTa counts its classes so.
            assert READERS[family](remark, hub) == plain


@pytest.mark.parametrize("family", READERS)
@pytest.mark.parametrize("part", PARTS, ids=str)
def test_keys_of_other_architectures_are_refused(hub: Path, family: str, part: dict) -> None:
    with pytest.raises(CheckpointError, match=f"{[*part][0]} = .* asks for .*remove the key"):
        READERS[family](part, hub)


def test_two_sets_of_weights_are_named(hub: Path, tmp_path: Path) -> None:
    for path in hub.iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    arrays = files.read_tensors(hub)
    zeros = {name: 0 * array for name, array in arrays.items()}
    files.write_tensors(tmp_path, zeros)
    decoder = reading.describe(tmp_path)
    assert any("two sets of weights" in note for note in decoder.notes)
    assert not any(array.any() for array in decoder.arrays().values())


@pytest.mark.slow
def test_training_keeps_the_directory_of_an_encoder_decoder(tmp_path: Path) -> None:
    pairs = [{"document": f"the story of {i} and of {i + 1}", "summary": f"{i}"} for i in range(40)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    settings = {
        "Training.task": "summarization", "Training.steps": 1, "Training.batch_size": 2,
        "Training.sample_every": 0, "Training.evaluate_every": 0,
        "Data.train": (str(tmp_path / "pairs.jsonl"),), "Data.tokenizer": "train:320",
        "Seq2Seq.encoder_layers": 1, "Seq2Seq.decoder_layers": 1, "Model.model_dim": 16,
        "Model.heads": 2, "Model.head_dim": 8, "Model.mlp_dim": 16, "Pairs.max_source_length": 64,
        "Pairs.max_target_length": 16,
    }  # fmt: skip
    hub, ours, back = (tmp_path / name for name in ("hub", "ours", "back"))
    brt.train(brt.config_from_gin((), settings), tmp_path / "first")
    run("--from=brt", str(tmp_path / "first"), "--to=hf", str(hub))
    files.write_json(hub / "tokenizer_config.json", SETTINGS["tokenizer_config.json"])
    for name, more in (("config", {"some_remark": 3}), ("generation_config", {"top_k": 5})):
        path = hub / f"{name}.json"
        files.write_json(path, files.read_json(path) | more)
    run("--from=hf", str(hub), "--to=brt", str(ours))
    more = {"Data.tokenizer": str(ours / "spiece.model"), "Training.init_from": str(ours)}
    brt.train(brt.config_from_gin((), settings | more), tmp_path / "second")
    run("--from=brt", str(tmp_path / "second"), "--to=hf", str(back))
    assert json_files(back) == json_files(hub)
