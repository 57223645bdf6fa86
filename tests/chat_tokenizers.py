"""Writes tiny tokenizers with the chat templates that models of well-known families have."""

import json
from pathlib import Path
from typing import Any

_ALTERNATE = (
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/...') }}{% endif %}"
)
TEMPLATES = {
    "smollm2": (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM<|im_end|>\n' }}"
        "{% endif %}{{'<|im_start|>' + message['role'] + '\n'}}{% if message['role'] == "
        "'assistant' %}{% generation %}{{message['content'] + '<|im_end|>'}}{% endgeneration %}"
        "{% else %}{{message['content'] + '<|im_end|>'}}{% endif %}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "llama3": (
        "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = "
        "'<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | "
        "trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}"
        "{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    "mistral": (
        "{%- if messages[0].role == 'system' %}\n    {%- set system = messages[0].content %}\n"
        "    {%- set messages = messages[1:] %}\n{%- endif %}\n{{- bos_token }}\n"
        "{%- for message in messages %}\n" + _ALTERNATE + "\n"
        "    {%- if message.role == 'user' %}\n        {%- if loop.last and system is defined %}\n"
        "            {{- '[INST]' + system + '\n\n' + message.content + '[/INST]' }}\n"
        "        {%- else %}\n            {{- '[INST]' + message.content + '[/INST]' }}\n"
        "        {%- endif %}\n    {%- else %}\n        {{- message.content + eos_token }}\n"
        "    {%- endif %}\n{%- endfor %}\n"
    ),
    "gemma": (
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for message in messages %}" + _ALTERNATE + "{% if (message['role'] == 'assistant') %}"
        "{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}"
        "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
    ),
}  # fmt: skip
SPECIAL = {  # BOS, the end token, and others
    "smollm2": ("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    "llama3": (
        "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
        "<|eot_id|>",
    ),
    "mistral": ("<s>", "</s>", "[INST]", "[/INST]"),
    "gemma": ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
}  # fmt: skip
_TEXT = (
    "Why does the cat sit on the mat? Because it is warm there.\nuser\nassistant\nsystem\nmodel\n"
)


def write(name: str, place: Path) -> Path:
    """Writes a tokenizer with its template into a directory, and returns the tokenizer's file."""
    place.mkdir(parents=True, exist_ok=True)
    begin, end, *others = SPECIAL[name]
    config = {
        "tokenizer_class": "GemmaTokenizer" if name == "gemma" else "PreTrainedTokenizerFast",
        "bos_token": begin, "eos_token": end, "chat_template": TEMPLATES[name],
    }  # fmt: skip
    if name == "gemma":
        config |= {"unk_token": "<unk>", "pad_token": "<pad>", "additional_special_tokens": others}
        config["added_tokens_decoder"] = {
            f"{4 + i}": {"content": other, "special": True} for i, other in enumerate(others)
        }
    (place / "tokenizer_config.json").write_text(json.dumps(config))
    return (_sentencepiece if name == "gemma" else _byte_level)(place, begin, end, others)


def _byte_level(place: Path, *special: Any) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    begin, end, others = special
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ġ", "s"), ("<", "|"), ("|", ">")]
    names = [begin, end, *others, *letters, *map("".join, merges)]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(names)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([begin, end, *others])
    tokenizer.save(str(place / "tokenizer.json"))
    return place / "tokenizer.json"


def _sentencepiece(place: Path, *special: Any) -> Path:
    import sentencepiece

    begin, end, others = special
    with open(place / "tokenizer.model", "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(_TEXT.split("\n") * 9), model_writer=file, vocab_size=290,
            model_type="bpe", byte_fallback=True, add_dummy_prefix=False, minloglevel=2,
            remove_extra_whitespaces=False, normalization_rule_name="identity", pad_id=0, eos_id=1,
            bos_id=2, unk_id=3, bos_piece=begin, eos_piece=end, user_defined_symbols=others,
            hard_vocab_limit=False,
        )  # fmt: skip
    return place / "tokenizer.model"
