"""Tests exported language models and modeling_brt.py, the exported code that runs them."""

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from model_settings import with_settings

from brt.config import Config, Model, Sampling, Training
from brt.data import tokenizers
from brt.data.tokenizers import ByteLevelTokenizer
from brt.errors import CheckpointError
from brt.generation.session import Session
from brt.interop.exporting import ExportSource
from brt.interop.huggingface import convert, files, kept
from brt.interop.huggingface.decoder import export_format
from brt.layers.sections import Recurrence
from brt.tasks.language_modeling.task import LanguageModeling
from brt.types import Variables

WINDOW = 4
MODEL = Model(
    layers=3, model_dim=16, heads=2, head_dim=8, mlp_dim=24, window=WINDOW, vocab_size=256,
    relative_buckets=4, relative_max_distance=16, dtype="float32", kinds=(Recurrence(states=3),),
)  # fmt: skip
RECURRENT = {"Recurrence.layers": (1,)}
# Settings of typical pretrained decoders: grouped queries, biases, gated MLPs, rotary positions.
PRETRAINED = {
    "positions": "rotary", "Rotary.divisors": (1.5,),
    "Rotary.attention_factor": 1.1, "SelfAttention.normalize_qk": False,
    "SelfAttention.kv_heads": 1, "SelfAttention.bias": "all", "MLP.gated": True, "MLP.bias": True,
    "Embedding.tied": False, "Embedding.logit_scale": "one", "Norm.epsilon": 1e-3,
    "activation": "silu",
}  # fmt: skip
MODELS = {
    "t5": {},
    "rotary": {"positions": "rotary", **RECURRENT},
    "alibi": {"positions": "alibi", "Embedding.logit_scale": "vocab"},
    "no positions, plain queries": {
        "positions": "none", "SelfAttention.normalize_qk": False, **RECURRENT,
    },
    "no cache": {"Window.cache": False, "Recurrence.layers": (0, -1)},
    "strictly past": {"Window.attend_to_self": False, **RECURRENT},
    "null keys": {"Window.mask_empty_cache": False, "positions": "rotary", **RECURRENT},
    "scaled bias": {"SelfAttention.bias_before_scale": True, "positions": "alibi"},
    "parity": {
        "Window.attend_to_self": False, "Window.mask_empty_cache": False,
        "SelfAttention.bias_before_scale": True, **RECURRENT,
    },
    "feedback": {"Recurrence.layers": (0, 1), "feedback": True},
    "pretrained": PRETRAINED,
    "sinks": {**PRETRAINED, "Window.block": 3, "Window.sinks": 2},
    "windows by layer": {**PRETRAINED, "Window.by_layer": (2, 0), "Window.block": WINDOW,
        "Window.sinks": 1, "Rotary.local_base": 500.0, "Norm.offset": True, "Norm.place": "both",
        "Embedding.factor": 5.0, "Embedding.tied": True, "activation": "gelu_tanh"},
    "sinks and states": {**PRETRAINED, "Window.sinks": 2, **RECURRENT},
    "sinks with biases of positions": {"Window.sinks": 2, "SelfAttention.kv_heads": 1},
    "norms after": {**PRETRAINED, "Norm.place": "after", "Norm.queries_keys": "heads",
        "residual_factor": 0.5, "Rotary.skipped": (True, False), **RECURRENT},
    "layer norms, parallel": {**PRETRAINED, "Norm.kind": "layer", "parallel": True,
        "Rotary.channels": 2, "GatedDeltaNet.window_layers": (1,)},
    "capped logits": {**PRETRAINED, "SelfAttention.soft_cap": 2.0, "Embedding.soft_cap": 3.0,
        "Window.sinks": 2, "Embedding.logit_divisor": 2.0},
    "learned positions": {"positions": "learned", "Rotary.context": 9, "Window.cache": False,
        **RECURRENT},
    "norms of queries and keys": {**PRETRAINED, "Norm.queries_keys": "head", **RECURRENT},
    "dense memory": {**PRETRAINED, "DenseMemory.layers": (1,), "DenseMemory.size": 7,
        "DenseMemory.gate": "tanh", "Window.sinks": 2, "Window.block": 3},
    "dense memory without rotary positions": {"DenseMemory.layers": (1,), "DenseMemory.size": 9,
        "DenseMemory.gate": "tanh"},
    "delta rule beside a window": {**PRETRAINED, "GatedDeltaNet.window_layers": (0, 2)},
    "delta rule alone": {"GatedDeltaNet.layers": (1,), "GatedDeltaNet.heads": 3},
    **{
        f"{gate}, {layout}": {"Recurrence.gate": gate, "Recurrence.gate_layout": layout,
        **RECURRENT}
        for gate in ("fixed", "lstm", "gru")
        for layout in ("dual", "single", "skip")
    },
}  # fmt: skip


@pytest.fixture
def export(random_params: Callable, tmp_path: Path) -> Callable[..., SimpleNamespace]:
    """Returns a function that exports a random model with changed fields of Model.

    The flags are those of `to_hf`. The result has params, model, directory and printed lines.
    """

    def write(changes: dict[str, Any], **flags: Any) -> SimpleNamespace:
        model, flags = with_settings(MODEL, changes), {"verified": False, **flags}
        params, target = random_params(model), tmp_path / "theirs"
        own = LanguageModeling().export(
            ExportSource(tmp_path / "run", Config(model=model), params, tokenizers.ByteTokenizer)
        )
        lines = list(convert.to_hf(tmp_path / "run", own, target, **flags))
        return SimpleNamespace(params=params, model=model, directory=target, lines=lines)

    return write


def config_of(model: Model) -> Config:
    return Config(model=model, training=Training(segment_length=2 * WINDOW))


@pytest.mark.slow
def test_a_directory_holds_all_that_others_need(export: Callable) -> None:
    done = export(
        {"Recurrence.gate": "lstm", "Recurrence.gate_layout": "dual", "feedback": True, **RECURRENT}
    )
    assert {path.name for path in done.directory.iterdir()} == {
        "config.json", "model.safetensors", "modeling_brt.py", "decoder_brt.py", "layers_brt.py",
        "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    assert any("decoder of 3 layers, 1 of them recurrent, width 16" in x for x in done.lines)
    assert (done.directory / "modeling_brt.py").read_bytes() == export_format.CODE[0].read_bytes()
    settings = files.read_json(done.directory / "config.json")
    assert settings["auto_map"]["AutoModelForCausalLM"] == "modeling_brt.BrtForCausalLM"
    assert settings["kinds"] == ["window", "recurrent", "window"] and settings["bos_token_id"] == 0

    arrays = files.read_tensors(done.directory)
    block = {
        "norm": (16,), "q_proj.weight": (16, 16), "k_proj.weight": (16, 16),
        "v_proj.weight": (16, 16), "scale": (2,), "o_proj.weight": (16, 32), "mlp_norm": (16,),
        "up_proj.weight": (24, 16), "down_proj.weight": (16, 24), "cross_q_proj.weight": (16, 16),
        "cross_scale": (2,), "bias": (2, 4),
    }  # fmt: skip
    gates = {
        f"{gate}.{name}": (*inputs, 16)
        for gate, features in (("output_gate", (2, 2, 8)), ("mlp_gate", (24,)))
        for name, inputs in (
            ("bias", ()), ("input_bias", ()), ("kernel", features), ("input_kernel", features),
        )
    }  # fmt: skip
    by_head = dict.fromkeys(("keys", "values", "queries", "cross_queries"), (16, 2, 8))
    cell = by_head | gates | {
        "initial": (3, 16), "ids": (3, 16), "norm": (16,), "scale": (2,), "cross_scale": (2,),
        "output": (2, 2, 8, 16), "mlp_norm": (16,), "mlp_in": (16, 24), "mlp_out": (24, 16),
    }  # fmt: skip
    expected = {"embed_tokens.weight": (256, 16), "norm": (16,)}
    for layer in range(3):
        expected |= {f"layers.{layer}.{name}": shape for name, shape in block.items()}
    expected |= {f"layers.1.cell.{name}": shape for name, shape in cell.items()}
    assert {name: array.shape for name, array in arrays.items()} == {
        f"decoder.{name}": shape for name, shape in expected.items()
    }


def test_an_export_in_bfloat16_rounds_its_arrays(export: Callable) -> None:
    done = export(RECURRENT, dtype="bfloat16")
    assert {str(x.dtype) for x in files.read_tensors(done.directory).values()} == {"bfloat16"}
    assert files.read_json(done.directory / "config.json")["dtype"] == "bfloat16"


def test_verification_without_torch_says_what_was_not_compared(
    export: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_format.importlib.util, "find_spec", lambda name: None)
    done = export(RECURRENT, verified=True)
    assert any("arrays are bit-equal" in line for line in done.lines)
    assert "logits and text: not compared; pip install torch" in "\n".join(done.lines)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"Memorizing.layers": (1,)}, r"Memorizing.layers = \(1,\) cannot be exported"),
        ({"Clustered.layers": (0,)}, r"Clustered.layers = \(0,\) cannot be exported"),
        ({"Summaries.layers": (1,)}, r"Summaries.layers = \(1,\) cannot be exported"),
        ({"RGLRU.layers": (1,)}, r"RGLRU.layers = \(1,\) cannot be exported"),
    ],
)
def test_other_kinds_of_layers_are_refused(changes: dict, sentence: str) -> None:
    own = export_format.TrainedDecoder({}, with_settings(MODEL, changes), 0)
    with pytest.raises(CheckpointError, match=sentence):
        export_format.to_format(own)


def test_bytes_are_ids_in_the_tokenizer_of_others(tmp_path: Path) -> None:
    text, own = "It wás\n late\t – \u0100\U0001f600 ", tokenizers.ByteTokenizer()
    names = kept.write_tokenizer(own, tmp_path, own_code=True)
    assert names == ["tokenizer.json", "tokenizer_config.json"]
    theirs = opened(tmp_path / "tokenizer.json")
    ids = theirs.encode(text).ids
    assert ids == own.encode(text).tolist()
    assert theirs.decode([0, *ids]) == text
    described = files.read_json(tmp_path / "tokenizer_config.json")
    assert theirs.token_to_id(described["bos_token"]) == own.bos_id


SPELT_NUL = "\u0100"


def test_a_tokenizer_of_others_neither_adds_nor_truncates(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    settings = kept.byte_tokenizer()
    settings["pre_tokenizer"] = settings["pre_tokenizer"] | {"add_prefix_space": True}
    settings["added_tokens"][0] |= {"id": 256, "content": "<s>"}
    settings["model"]["vocab"] |= {"<s>": 256, SPELT_NUL: 257}
    settings["truncation"] = {
        "direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    (tmp_path / "own/tokenizer.json").write_text(json.dumps(settings))
    own = ByteLevelTokenizer(tmp_path / "own/tokenizer.json")
    kept.write_tokenizer(own, tmp_path, own_code=True)
    ids = opened(tmp_path / "tokenizer.json").encode("It was late").ids
    assert ids == own.encode("It was late").tolist()
    assert files.read_json(tmp_path / "tokenizer_config.json")["bos_token"] == "<s>"


def test_sentencepiece_reads_as_we_do(tmp_path: Path) -> None:
    import sentencepiece

    from brt.data.tokenizer_training import train_sentencepiece

    (tmp_path / "own").mkdir()
    path = tmp_path / "own/tokenizer.model"
    train_sentencepiece(["it was a dark and stormy night, it was"] * 20, 290, path, seed=0)
    own = tokenizers.load(str(path))
    assert kept.write_tokenizer(own, tmp_path, own_code=True) == ["tokenizer.model"]
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    text = "it was  dark\n night "
    assert theirs.encode(text) == own.encode(text).tolist()


def opened(path: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))


def of_torch(test: Callable) -> Callable:
    """Marks a test that needs torch as slow and skips it without torch.

    Warnings are ignored, because torch and transformers cause many.
    """
    test = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")(test)
    return pytest.mark.slow(pytest.mark.filterwarnings("ignore")(test))


def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.mark.parametrize("kind", MODELS)
@of_torch
def test_logits_are_ours_over_segments_cut_anywhere(kind: str, export: Callable) -> None:
    done = export(MODELS[kind])
    ids = np.random.default_rng(0).integers(256, size=(2, 6 * WINDOW))
    expected = export_format.segment_logits(done.params, done.model, np.split(ids, 2, axis=1))
    theirs = export_format.import_code(done.directory).load(done.directory)
    for cuts in ([8, 16], [1, 2, 7, 8, 20]):
        found, state = [], None
        for piece in np.split(ids, cuts, axis=1):
            logits, state = theirs(torch().from_numpy(piece), state)
            found.append(logits.detach().numpy())
        np.testing.assert_allclose(np.concatenate(found, axis=1), expected, atol=1e-4)


@pytest.mark.parametrize(
    "kind",
    ["feedback", "rotary", "lstm, dual", "parity", "no cache", "sinks", "dense memory"],
)
@of_torch
def test_the_exported_model_writes_the_greedy_text_of_brt(kind: str, export: Callable) -> None:
    done = export(MODELS[kind], verified=True)
    assert any(line.startswith("logits against 3 segments read by brt") for line in done.lines)
    assert "greedy text against brt: the same 32 tokens" in done.lines
    session = Session(config_of(done.model), Variables(done.params), bos_id=0)
    session.read([5, 6, 7, 8, 9])
    sampling = Sampling(temperature=0.0)
    ours = [*session.write(20, sampling, jax.random.key(0))]
    theirs = export_format.import_code(done.directory).load(done.directory)
    prompt = torch().tensor([[0, 5, 6, 7, 8, 9]])
    text = theirs.generate(prompt, max_new_tokens=20).numpy()
    np.testing.assert_array_equal(text[:, 6:], np.concatenate(ours, axis=1))


@of_torch
def test_what_is_carried_stays_as_large_as_it_was(export: Callable) -> None:
    done = export(MODELS["gru, single"])
    theirs = export_format.import_code(done.directory).load(done.directory)
    ids, state, sizes = torch().ones(1, 10 * WINDOW, dtype=torch().long), None, []
    for piece in ids.split(WINDOW, dim=1):
        _, state = theirs(piece, state)
        sizes.append(sum(layer.keys.numel() for layer in state.layers))
    assert len(set(sizes)) == 1


@of_torch
def test_samples_are_of_the_likeliest(export: Callable) -> None:
    done = export(MODELS["t5"])
    module = export_format.import_code(done.directory)
    theirs, prompt = module.load(done.directory), torch().zeros(3, 1, dtype=int)
    options = {"do_sample": True, "max_new_tokens": 9, "temperature": 0.5}
    greedy = theirs.generate(prompt, max_new_tokens=9)
    assert (theirs.generate(prompt, top_k=1, **options) == greedy).all()
    assert (theirs.generate(prompt, top_p=1e-6, **options) == greedy).all()
    draws = [
        theirs.generate(prompt, generator=torch().Generator().manual_seed(1), **options)
        for _ in range(2)
    ]
    assert (draws[0] == draws[1]).all() and (draws[0] != greedy).any()


@of_torch
def test_verification_finds_wrong_logits(export: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = export_format.segment_logits
    monkeypatch.setattr(export_format, "segment_logits", lambda *args: -kept(*args))
    with pytest.raises(CheckpointError, match="logits against 3 segments read by brt"):
        export(MODELS["t5"], verified=True)


@of_torch
def test_rounded_weights_are_verified_within_their_rounding(export: Callable) -> None:
    done = export(MODELS["fixed, skip"], verified=True, dtype="bfloat16")
    assert "greedy text against brt: the same 32 tokens" in done.lines


@pytest.fixture
def opened_by_transformers(export: Callable, transformers: Any) -> Callable[[str], SimpleNamespace]:
    """Returns a function that exports a kind of `MODELS` and opens it with transformers.

    The result has the exported directory, the model, its tokenizer, and `alone`, the model that is
    opened without transformers.
    """

    def open_model(kind: str) -> SimpleNamespace:
        done = export(MODELS[kind])
        auto = transformers.AutoModelForCausalLM, transformers.AutoTokenizer
        options = {"trust_remote_code": True, "local_files_only": True}
        model, tokenizer = (a.from_pretrained(done.directory, **options) for a in auto)
        alone = export_format.import_code(done.directory).load(done.directory)
        return SimpleNamespace(
            directory=done.directory, model=model, tokenizer=tokenizer, alone=alone
        )

    return open_model


OPENED = ["feedback", "windows by layer", "delta rule beside a window", "dense memory", "null keys"]


@pytest.mark.parametrize("kind", OPENED)
@of_torch
def test_transformers_reads_and_writes_as_brt(kind: str, opened_by_transformers: Callable) -> None:
    opened = opened_by_transformers(kind)
    ids = opened.tokenizer("It was late.", return_tensors="pt").input_ids
    with_bos = torch().cat([torch().zeros_like(ids[:, :1]), ids], dim=1)
    expected = opened.alone(with_bos).logits.detach()
    np.testing.assert_allclose(opened.model(with_bos).logits.detach(), expected, atol=1e-5)
    # A text that does not begin with BOS is read as if it did.
    np.testing.assert_allclose(opened.model(ids).logits.detach(), expected[:, 1:], atol=1e-5)
    written = opened.model.generate(with_bos, max_new_tokens=9, do_sample=False)
    assert (written == opened.alone.generate(with_bos, max_new_tokens=9)).all()
    state = opened.model(with_bos).state
    continued = opened.model.generate(ids[:, :3], state=state, max_new_tokens=9, do_sample=False)
    own = opened.alone.generate(ids[:, :3], state=opened.alone(with_bos).state, max_new_tokens=9)
    assert (continued == own).all()


@pytest.mark.parametrize("kind", OPENED)
@of_torch
def test_texts_of_a_padded_batch_are_read_and_continued_as_alone(
    kind: str, opened_by_transformers: Callable
) -> None:
    opened = opened_by_transformers(kind)
    texts = ["It", "It was late in the evening", "", "It was late."]
    batch = opened.tokenizer(texts, return_tensors="pt", padding=True)
    output = opened.model(**batch)
    written = opened.model.generate(**batch, max_new_tokens=9, do_sample=False)
    beams = opened.model.generate(**batch, max_new_tokens=5, num_beams=3, do_sample=False)
    for i, text in enumerate(texts):
        ids = torch().tensor([[0, *text.encode()]])
        found = output.logits[i, -1].detach()
        np.testing.assert_allclose(found, opened.alone(ids).logits[0, -1].detach(), atol=1e-5)
        expected = opened.alone.generate(ids, max_new_tokens=9)[0, ids.shape[1] :]
        assert written[i, -9:].tolist() == expected.tolist()
        searched = opened.model.generate(ids, max_new_tokens=5, num_beams=3, do_sample=False)
        assert beams[i, -5:].tolist() == searched[0, -5:].tolist()


@of_torch
def test_losses_and_hidden_states_are_those_of_transformers(
    opened_by_transformers: Callable,
) -> None:
    opened = opened_by_transformers("sinks and states")
    ids = torch().tensor([[0, *b"It was late."], [0, *b"It was a day"]])
    labels = ids.clone()
    labels[1, 5:] = -100
    mask = (labels != -100).long()
    output = opened.model(
        input_ids=ids, labels=labels, attention_mask=mask, output_hidden_states=True
    )
    logits = opened.alone(ids).logits
    loss = torch().nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    )
    np.testing.assert_allclose(output.loss.item(), loss.item(), rtol=1e-5)
    assert [tuple(x.shape) for x in output.hidden_states] == [(2, 13, 16)] * 4
    again = opened.model.get_output_embeddings()(output.hidden_states[-1])
    np.testing.assert_allclose(again.detach(), output.logits.detach(), atol=1e-5)
    embedded = opened.model.get_input_embeddings()(ids)
    np.testing.assert_allclose(output.hidden_states[0].detach(), embedded.detach(), atol=1e-6)
    output.loss.backward()
    assert all(p.grad is not None for p in opened.model.parameters())


@of_torch
def test_masks_and_options_that_cannot_be_read_are_refused(
    opened_by_transformers: Callable,
) -> None:
    opened = opened_by_transformers("feedback")
    ids = torch().tensor([[0, 5, 6, 7]])
    for mask in ([1, 0, 1, 1], [0, 1, 0, 1]):
        with pytest.raises(ValueError, match="0 within a text"):
            opened.model(ids, attention_mask=torch().tensor([mask]))
    with pytest.raises(ValueError, match="pad prompts on the left"):
        opened.model.generate(ids, attention_mask=torch().tensor([[1, 1, 1, 0]]))
    settings = opened.model.generation_config
    for options in ({"guidance_scale": 1.5}, {"generation_config": settings}):
        settings.guidance_scale = 1.5
        with pytest.raises(ValueError, match="guidance_scale is not supported; remove it"):
            opened.model.generate(ids, max_new_tokens=2, **options)
    settings.guidance_scale = None
    with pytest.raises(ValueError, match="position_ids is not supported"):
        opened.model(ids, position_ids=ids)
    state = opened.model(ids).state
    with pytest.raises(ValueError, match="within texts that `state` continues"):
        opened.model(ids, state=state, attention_mask=torch().tensor([[0, 1, 1, 1]]))
