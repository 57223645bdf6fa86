"""Tests directories that transformers itself writes: all of them is used, given back or named, and
transformers loads the exports by its strict configs. Needs torch and transformers.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_decoder import write_decoder

from brt import convert
from brt.data import tokenizers
from brt.data.tokenizer_training import train_sentencepiece
from brt.interop.huggingface import files

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
SIZES = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GPT2 = {
    "vocab_size": 300, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
LOCAL, FULL = "sliding_attention", "full_attention"
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 500.0, "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [1.2, 2.0, 4.0], "original_max_position_embeddings": 16, "factor": 4.0,
    "partial_rotary_factor": 0.75,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": 16, "head_dim": 8}),
    "qwen2": ("Qwen2", {}),
    "qwen2 in windows": ("Qwen2", {
        "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3 all in windows": ("Qwen3", {
        "head_dim": 16, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}),
    "gemma3": ("Gemma3", {
        "head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 24,
        "layer_types": [LOCAL, FULL, LOCAL]}),
    "llama, yarn": ("Llama", {"rope_parameters": YARN}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1], "attention_bias": True}),
    "gemma": ("Gemma", {"head_dim": 16, "num_key_value_heads": 1}),
    "gemma2": ("Gemma2", {
        "head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 24,
        "layer_types": [LOCAL, FULL, LOCAL]}),
    "phi3": ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16}),
    "phi3 in windows": ("Phi3", {"sliding_window": 16}),
    "granite": ("Granite", {
        "embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22,
        "attention_multiplier": 0.3, "attention_bias": True, "mlp_bias": True}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {"sliding_window": 16, "layer_types": [LOCAL, FULL, LOCAL],
        "rope_parameters": {LOCAL: {"rope_type": "default", "rope_theta": 500.0}, FULL: YARN}}),
    "pythia": ("GPTNeoX", {"rotary_pct": 0.5}),
    "pythia in sequence": ("GPTNeoX", {"use_parallel_residual": False, "attention_bias": False}),
    "gpt2": ("GPT2", {}),
    "mixtral": ("Mixtral", {"num_local_experts": 3, "head_dim": 8}),
    "qwen3 with experts": ("Qwen3Moe", {
        "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "norm_topk_prob": True}),
    "gpt_oss": ("GptOss", {
        "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16,
        "layer_types": [LOCAL, FULL, LOCAL], "rope_parameters": {**YARN, "truncate": False}}),
}  # fmt: skip
T5 = {
    "vocab_size": 300, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
BART = {
    "vocab_size": 300, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "max_position_embeddings": 64, "init_std": 0.3,
}  # fmt: skip
ROBERTA = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 66, "type_vocab_size": 1,
    "initializer_range": 0.3,
}  # fmt: skip
GATED = {"feed_forward_proj": "gated-gelu"}
LONG = {"encoder_attention_type": "transient-global", "local_radius": 9, "global_block_size": 8}
# Encoder-decoders and encoders: the class and its settings.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5ForConditionalGeneration", T5),
    "t5 gated": ("T5ForConditionalGeneration", T5 | GATED | {"tie_word_embeddings": False}),
    "longt5 local": ("LongT5ForConditionalGeneration", T5 | {"local_radius": 9}),
    "longt5 global": ("LongT5ForConditionalGeneration", T5 | GATED | LONG),
    "bart": ("BartForConditionalGeneration", BART),
    "roberta": ("RobertaForMaskedLM", ROBERTA),
    "roberta, classes": ("RobertaForSequenceClassification", ROBERTA | {"num_labels": 3}),
    "roberta, spans": ("RobertaForQuestionAnswering", ROBERTA),
}
CHAT = [{"role": "user", "content": "Hi"}]
TEMPLATE = "{% for m in messages %}<|im_start|>{{m['role']}} {{m['content']}}<|im_end|>{% endfor %}"


@pytest.mark.parametrize("own_code", [False, True])
@pytest.mark.parametrize("case", FAMILIES)
def test_a_family_goes_through_brt(
    case: str, own_code: bool, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    family, settings = FAMILIES[case]
    kind = f"{family}TextConfig" if family == "Gemma3" else f"{family}Config"
    sizes = GPT2 if family == "GPT2" else dict(SIZES)
    if family == "GPTNeoX":
        del sizes["num_key_value_heads"]
    config = getattr(transformers, kind)(**sizes | settings)
    torch.manual_seed(0)
    head = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    model = getattr(transformers, f"{family}{head}")(config)
    model.generation_config.update(do_sample=True, temperature=0.6, repetition_penalty=1.05)
    hub, ours, back = (tmp_path / part for part in ("hub", "ours", "back"))
    model.save_pretrained(hub)
    save_tokenizer(transformers, base / "tokenizer.json", hub)
    arguments = ("--window=8", "--sinks=2") if own_code and family != "GPT2" else ()
    own_code = bool(arguments)
    run("--from=hf", str(hub), "--to=brt", str(ours), *arguments)
    plain = () if own_code else ("--plain",)
    run("--from=brt", str(ours), "--to=hf", str(back), "--verify", *plain)
    said = capsys.readouterr().out

    trusted = {"trust_remote_code": own_code}
    before = transformers.AutoTokenizer.from_pretrained(hub)
    after = transformers.AutoTokenizer.from_pretrained(back, **trusted)
    for call in (lambda t: t("It was").input_ids, lambda t: t.apply_chat_template(CHAT)):
        assert call(after) == call(before)
    assert after.special_tokens_map == before.special_tokens_map
    assert after.model_max_length == before.model_max_length == 64
    again = transformers.AutoConfig.from_pretrained(back, **trusted)
    transformers.AutoModelForCausalLM.from_pretrained(back, **trusted)
    sampling = (transformers.GenerationConfig.from_pretrained(place) for place in (hub, back))
    assert next(sampling) == next(sampling)
    wanted, found = (json.loads((p / "config.json").read_text()) for p in (hub, back))
    for key, value in wanted.items() if not own_code else ():
        # transformers writes a list of layer types where other keys say the same.
        derived = "window" in key or key == "layer_types"
        assert found.get(key) == value or derived or value is None or key in said, key
        if key not in ("dtype", "transformers_version"):
            assert getattr(again, key) == getattr(config, key) or derived, key
    assert_files_given_back(hub, back, said)


@pytest.mark.parametrize("case", OTHERS)
def test_an_encoder_goes_through_brt(
    case: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    name_of_class, settings = OTHERS[case]
    family = name_of_class.partition("For")[0]
    config = getattr(transformers, f"{family}Config")(**settings)
    torch.manual_seed(0)
    model = getattr(transformers, name_of_class)(config)
    hub, ours, back = (tmp_path / part for part in ("hub", "ours", "back"))
    if model.can_generate():
        model.generation_config.update(
            do_sample=True, temperature=0.6, repetition_penalty=1.05, num_beams=2, max_length=50
        )
    model.save_pretrained(hub)
    save_tokenizer(transformers, base / "tokenizer.json", hub)
    run("--from=hf", str(hub), "--to=brt", str(ours), "--verify")
    run("--from=brt", str(ours), "--to=hf", str(back), "--verify")
    said = capsys.readouterr().out
    assert said.count("logits against transformers: largest") == 2

    again = getattr(transformers, f"{family}Config").from_pretrained(back).to_dict()
    written = {"_name_or_path": again["_name_or_path"], "architectures": again["architectures"]}
    assert again == model.config.to_dict() | written
    for name, wanted in json_settings(hub).items():
        found = json_settings(back)[name]
        for key, value in wanted.items():
            # Before version 5, this key of T5 said how logits are scaled, and it is written so.
            derived = key == "tie_word_embeddings"
            assert found.get(key, value) == value or derived, (name, key)
            assert key in found or value is None or key == "transformers_version", (name, key)
    if model.can_generate():
        assert all(word in said for word in ("repetition_penalty", "do_sample", "temperature"))
    before, after = (transformers.AutoTokenizer.from_pretrained(p) for p in (hub, back))
    assert after("It was").input_ids == before("It was").input_ids
    assert after.special_tokens_map == before.special_tokens_map
    assert_files_given_back(hub, back, said)


def test_the_own_code_heeds_the_settings_of_generation(tmp_path: Path) -> None:
    """Within the window, it writes the texts of Llama, except for the keys that are left out."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    hub, ours, back = (tmp_path / part for part in ("hub", "ours", "back"))
    write_decoder(hub)
    left_out = {"prompt_lookup_num_tokens": 3, "prefill_chunk_size": 3, "output_attentions": True}
    files.write_json(hub / "generation_config.json", {"top_k": 3} | left_out)
    run("--from=hf", str(hub), "--to=brt", str(ours), "--window=32", "--sinks=4")
    run("--from=brt", str(ours), "--to=hf", str(back))
    assert not files.read_json(back / "generation_config.json").keys() & left_out.keys()
    load = transformers.AutoModelForCausalLM.from_pretrained
    models = load(hub), load(back, trust_remote_code=True)
    models[0].generation_config = models[1].generation_config
    for model, norm in zip(models, ("model.norm.weight", "decoder.norm"), strict=True):
        model.get_parameter(norm).data *= 0.2  # So that many tokens are likely.

    def write(model: Any, settings: dict[str, Any]) -> list:
        torch.manual_seed(0)
        ids = torch.tensor([[1, 40, 60, 80, 100, 41, 60]])
        asked = transformers.GenerationConfig(
            **{"max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": 2, **settings}
        )
        return model.generate(
            ids, generation_config=asked, attention_mask=torch.ones_like(ids)
        ).tolist()

    for settings in (
        {"do_sample": True, "temperature": 0.7}, {"do_sample": True, "top_k": 3, "min_p": 0.1},
        {"do_sample": True, "top_p": 0.4, "typical_p": 0.5}, {"repetition_penalty": 1.8},
        {"no_repeat_ngram_size": 2}, {"num_beams": 3, "length_penalty": 2.0},
        {"bad_words_ids": [[5]], "suppress_tokens": [6]}, {"forced_eos_token_id": 2},
        {"exponential_decay_length_penalty": [2, 1.5]}, {"min_new_tokens": 10}, {"max_length": 14},
    ):  # fmt: skip
        llama, own = (write(model, settings) for model in models)
        assert own == llama, settings
    for name, value in left_out.items():
        with pytest.raises(ValueError):
            write(models[1], {name: value})


@pytest.mark.parametrize("own", ["json", "model"])
@pytest.mark.parametrize("named", [None, "<s>"])
@pytest.mark.parametrize("adds", [None, True, False])
def test_documents_begin_as_texts_of_transformers(
    own: str, named: str | None, adds: bool | None, tmp_path: Path
) -> None:
    """If transformers puts a token before a text, brt's documents begin with it."""
    transformers = pytest.importorskip("transformers")
    train_sentencepiece([["It was the best of times"] * 40], 300, tmp_path / "tokenizer.model")
    settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": adds, "bos_token": named}
    given = {name: value for name, value in settings.items() if value is not None}
    files.write_json(tmp_path / "tokenizer_config.json", given)
    # A tokenizer.json is written with a post-processor that puts BOS, and the flag is changed then.
    if own == "json":
        files.write_json(tmp_path / "tokenizer_config.json", {**given, "add_bos_token": True})
        transformers.AutoTokenizer.from_pretrained(tmp_path).backend_tokenizer.save(
            str(tmp_path / "tokenizer.json")
        )
        files.write_json(tmp_path / "tokenizer_config.json", given)
    files.write_json(tmp_path / "config.json", {"model_type": "llama", "bos_token_id": 2})
    ids = transformers.AutoTokenizer.from_pretrained(tmp_path)("times").input_ids
    ours = tokenizers.load(str(tmp_path / "tokenizer.model"))
    assert (ids[0] < 3) == (own == "json" or adds is True)
    assert ids[0] == ours.bos_id or ids[0] >= 3
    said = any("add_bos_token" in note and "BOS" in note for note in ours.notes)
    assert said == (own == "model" and adds is False)


def save_tokenizer(transformers: Any, tokenizer_file: Path, place: Path) -> None:
    transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer_file), bos_token="<|im_start|>", eos_token="<|im_end|>",
        pad_token="<|endoftext|>", unk_token="<|endoftext|>", model_max_length=64,
        chat_template=TEMPLATE,
    ).save_pretrained(place)  # fmt: skip


def json_settings(directory: Path) -> dict[str, Any]:
    names = ("config.json", "generation_config.json", "tokenizer_config.json")
    return {n: files.read_json(directory / n) for n in names if (directory / n).is_file()}


def assert_files_given_back(hub: Path, back: Path, said: str) -> None:
    weights = files.weight_files(hub)
    for path in hub.iterdir():
        given_back = (back / path.name).is_file() or path.name in said
        assert given_back or path.name in weights, path.name


def run(*flags: str) -> None:
    convert.main(convert.parser().parse_args(flags))
