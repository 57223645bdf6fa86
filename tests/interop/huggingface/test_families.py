"""Tests exported decoders in the libraries that people use them with.

Every family that brt exports, in transformers' own classes or with brt's PyTorch code, is made by
transformers, converted to brt and exported again. The export is then loaded, used in a pipeline,
trained by Trainer and by PEFT, and measured by lm-evaluation-harness.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_settings import with_settings
from tiny_decoder import TEXT, write_decoder

from brt.config import Config, Model
from brt.interop.exporting import ExportSource
from brt.interop.huggingface import convert
from brt.interop.huggingface.causal import reading
from brt.interop.huggingface.causal.config import WindowChoice
from brt.models.decoder import Decoder, new_state
from brt.tasks.language_modeling.task import LanguageModeling
from brt.types import Variables

SIZES = {
    "vocab_size": 280, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0,
    "initializer_range": 0.3,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {}, "mistral": {"sliding_window": 64}, "qwen2": {}, "qwen3": {},
    "gpt_neox": {"rotary_pct": 0.5, "head_dim": None, "num_key_value_heads": None}, "olmo2": {},
    "phi3": {}, "granite": {"residual_multiplier": 0.3, "attention_multiplier": 0.3},
    "smollm3": {"no_rope_layers": [1, 0]}, "gemma": {},
    "olmo3": {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma2": {"sliding_window": 32, "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention"]},
    "gemma3_text": {
        "sliding_window": 32, "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "mixtral": {"num_local_experts": 3},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gpt_oss": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    },
}  # fmt: skip
# These are exported with brt's PyTorch code. The values are changes of the settings of a Llama.
WITH_CODE: dict[str, dict[str, Any]] = {
    "window and sinks": {},
    "recurrence": {"Recurrence.layers": (0,), "Recurrence.states": 4},
    "dense memory": {"DenseMemory.layers": (1,), "DenseMemory.size": 48,
        "DenseMemory.gate": "tanh"},
    "Gated DeltaNet": {"GatedDeltaNet.window_layers": (1,)},
    "experts": {"MLP.experts": 3, "MLP.experts_per_token": 2, "SelfAttention.learned_sink": True},
}  # fmt: skip
NEOX_MODULES = ["query_key_value", "dense_4h_to_h"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
DOCUMENTS = [TEXT[:500], TEXT[100:400]]

pytestmark = [
    pytest.mark.slow,  # Each case loads torch and a model.
    pytest.mark.filterwarnings("ignore"),  # Torch and transformers themselves cause warnings.
]


def imported(*names: str) -> list[Any]:
    return [pytest.importorskip(name) for name in ("torch", *names)]


@pytest.fixture(scope="module")
def exported(
    tmp_path_factory: pytest.TempPathFactory, transformers: Any
) -> Callable[[str], SimpleNamespace]:
    """Returns a function that exports a family.

    The result has the exported directory and the original one, the settings, variables and the
    tokenizer in brt, and whether the export needs its own code.
    """
    place = tmp_path_factory.mktemp("families")
    return functools.cache(lambda name: export(name, place / name.replace(" ", "_")))


def export(name: str, place: Path) -> SimpleNamespace:
    original, target = place / "original", place / "exported"
    place.mkdir()
    write_original(name if name in FAMILIES else "llama", place, original)
    choice = WindowChoice(32, 4) if name in WITH_CODE else WindowChoice()
    decoder = reading.describe(original, choice)
    changes = {"dtype": "float32", "Window.block": 32, **WITH_CODE.get(name, {})}
    model = with_settings(decoder.model, changes)
    params = initial(model) if name in WITH_CODE and WITH_CODE[name] else decoder.params()
    config = Config(model=model)
    source = ExportSource(place, config, params, lambda: decoder.tokenizer)
    list(convert.to_hf(place, LanguageModeling().export(source), target, verified=False))
    return SimpleNamespace(
        directory=target, original=original, config=config, variables=Variables(params, {}),
        tokenizer=decoder.tokenizer, own_code=name in WITH_CODE,
    )  # fmt: skip


def write_original(family: str, place: Path, target: Path) -> None:
    torch, transformers = imported("transformers")
    torch.manual_seed(0)
    settings = SIZES | FAMILIES[family]
    config = transformers.AutoConfig.for_model(family, **settings)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(target)
    write_decoder(place / "tiny")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(place / "tiny/tokenizer.json"), bos_token="<|endoftext|>",
        eos_token="<|im_end|>", pad_token="<|endoftext|>", padding_side="left",
    )  # fmt: skip
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(target)


def initial(model: Model) -> Any:
    """Returns random parameters, also where new models have zeros, such as in gates."""
    tokens, start = jnp.zeros((1, model.block_length), jnp.int32), jnp.ones((1, 1), bool)
    variables = Decoder(model).init(jax.random.key(0), tokens, new_state(model, 1), start)
    params = nn.meta.unbox(variables)["params"]
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: x + 0.2 * jnp.asarray(rng.normal(size=x.shape), x.dtype), params)


def opened(done: SimpleNamespace) -> tuple[Any, Any]:
    """Returns the model and the tokenizer as transformers opens them."""
    (transformers,) = imported("transformers")[1:]
    auto = transformers.AutoModelForCausalLM, transformers.AutoTokenizer
    options = {"trust_remote_code": done.own_code, "local_files_only": True}
    model, tokenizer = (a.from_pretrained(done.directory, **options) for a in auto)
    return model.float(), tokenizer


def nats(done: SimpleNamespace, text: str) -> np.ndarray:
    """Returns what brt computes for each token of a document."""
    scorer = LanguageModeling().scorer(done.config, done.tokenizer)
    return np.asarray(scorer(done.variables, done.tokenizer.encode(text)))


EVERY = pytest.mark.parametrize("family", [*FAMILIES, *WITH_CODE])


@EVERY
def test_a_pipeline_writes_a_batch_as_one_by_one(family: str, exported: Callable) -> None:
    (transformers,) = imported("transformers")[1:]
    done = exported(family)
    pipe = transformers.pipeline(
        "text-generation", model=str(done.directory), trust_remote_code=done.own_code
    )
    texts = ["It was the", "It was the worst of times; it was", "Age"]
    options = {"max_new_tokens": 8, "do_sample": False}
    batch = pipe(texts, batch_size=3, **options)
    alone = [pipe(text, **options) for text in texts]
    assert [one[0]["generated_text"] for one in batch] == [
        one[0]["generated_text"] for one in alone
    ]


def trained(model: Any, tokenizer: Any, place: Path) -> None:
    """Trains a model for one step on texts of different lengths."""
    (transformers,) = imported("transformers", "accelerate")[1:-1]
    arguments = transformers.TrainingArguments(
        output_dir=str(place), max_steps=1, learning_rate=1e-3, per_device_train_batch_size=2,
        use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    data = [dict(tokenizer(text[:100])) for text in DOCUMENTS] + [dict(tokenizer("It was"))]
    collate = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=data, data_collator=collate
    )
    assert np.isfinite(trainer.train().training_loss)


@EVERY
def test_trainer_trains_it(family: str, exported: Callable, tmp_path: Path) -> None:
    model, tokenizer = opened(exported(family))
    before = {name: x.detach().clone() for name, x in model.named_parameters()}
    trained(model, tokenizer, tmp_path)
    changed = [name for name, x in model.named_parameters() if (x != before[name]).any()]
    assert len(changed) > len(before) / 2


@EVERY
def test_peft_trains_it_and_finds_its_adapter_again(
    family: str, exported: Callable, tmp_path: Path
) -> None:
    torch, peft = imported("peft")
    done = exported(family)
    model, tokenizer = opened(done)
    modules = NEOX_MODULES if family == "gpt_neox" else ["q_proj", "down_proj"]
    settings = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=modules)
    model = peft.get_peft_model(model, settings)
    trained(model, tokenizer, tmp_path / "trainer")
    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(opened(done)[0], tmp_path / "adapter")
    ids = torch.tensor([[0, 5, 6, 7]])
    with torch.no_grad():
        found, base = again.eval()(input_ids=ids).logits, opened(done)[0](ids).logits
        torch.testing.assert_close(found, model.eval()(input_ids=ids).logits)
    assert (found != base).any()


@EVERY
def test_the_default_number_of_lm_eval_is_that_of_brt(
    family: str, exported: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, lm_eval, datasets = imported("lm_eval", "datasets")
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    done, rows = exported(family), [json.dumps({"text": text}) for text in DOCUMENTS]
    (tmp_path / "books.json").write_text("\n".join(rows))
    (tmp_path / "books.yaml").write_text(
        "task: books\ndataset_path: json\noutput_type: loglikelihood_rolling\ntest_split: test\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path / 'books.json'}}}}}\n"
        "doc_to_text: ''\ndoc_to_target: '{{text}}'\nmetric_list: [{metric: bits_per_byte}]\n"
    )
    arguments = f"pretrained={done.directory},trust_remote_code={done.own_code},dtype=float32"
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    options = {"tasks": ["books"], "task_manager": manager, "device": "cpu", "batch_size": 2}
    found = lm_eval.simple_evaluate(model="hf", model_args=arguments, **options)
    bits = sum(nats(done, text).sum() for text in DOCUMENTS) / np.log(2)
    expected = bits / sum(len(text.encode()) for text in DOCUMENTS)
    number = found["results"]["books"]["bits_per_byte,none"]
    assert number == pytest.approx(expected, rel=1e-4)
