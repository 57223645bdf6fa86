"""Tests adapters in PEFT's format, and weights that are beside or below their usual place."""

import dataclasses
import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

import brt
from brt import convert, tasks
from brt.config import Adapter, Config, Training
from brt.errors import CheckpointError, ConfigError
from brt.interop.exporting import ExportSource
from brt.interop.huggingface import convert as converting
from brt.interop.huggingface import files
from brt.interop.huggingface.causal import export as exporting
from brt.interop.huggingface.causal import reading
from brt.interop.huggingface.causal.config import WindowChoice
from brt.tasks.language_modeling.task import LanguageModeling
from brt.training import trainable
from brt.training.state import initial_params, merged_params

DESCRIBED = {
    "peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": "NOBODY/nothing",
    "target_modules": ["q_proj", "down_proj"], "lora_dropout": 0.1, "megatron_core": "core",
}  # fmt: skip
ADAPTED = "model.layers.1.self_attn.q_proj.weight"


def run(*flags: str) -> None:
    convert.main(convert.parser().parse_args(flags))


def write_adapter(place: Path, described: dict[str, Any] | None = None, rank: int = 4) -> None:
    rng = np.random.default_rng(0)
    shapes = {"self_attn.q_proj": (32, 32), "mlp.down_proj": (32, 48)}
    arrays = {}
    for module, (outputs, inputs) in shapes.items():
        name = f"base_model.model.model.layers.1.{module}.lora"
        arrays[f"{name}_A.weight"] = rng.normal(size=(rank, inputs)).astype(np.float32)
        arrays[f"{name}_B.weight"] = rng.normal(size=(outputs, rank)).astype(np.float32)
    place.mkdir(exist_ok=True)
    files.write_json(place / "adapter_config.json", DESCRIBED | (described or {}))
    files.write_file(place / "adapter_model.safetensors", arrays)


def added(place: Path, scale: float) -> np.ndarray:
    """Returns what the adapter in `place` adds to the matrix `ADAPTED`."""
    arrays = files.read_file(place / "adapter_model.safetensors")
    a, b = (
        arrays[f"base_model.model.{ADAPTED}".replace("weight", f"lora_{x}.weight")] for x in "AB"
    )
    return scale * (b @ a)


@pytest.mark.parametrize("place", ["beside", "inside", "named"])
def test_an_adapter_is_added_to_its_base(place: str, base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "base")
    directory = {"beside": tmp_path / "base", "inside": tmp_path / "base/adapter"}.get(
        place, tmp_path / "adapter"
    )
    name = str(tmp_path / "base") if place == "named" else "NOBODY/nothing"
    write_adapter(directory, {"base_model_name_or_path": name})
    decoder = reading.describe(directory)
    before, after = files.read_tensors(base), decoder.arrays()
    assert before.keys() == after.keys() and str(directory) in "".join(decoder.notes)
    assert not any("not used" in note and "adapter_model" in note for note in decoder.notes)
    expected = before[ADAPTED] + added(directory, scale=2.0)
    np.testing.assert_allclose(after[ADAPTED], expected, rtol=1e-6)
    changed = {name for name in before if np.any(before[name] != after[name])}
    assert changed == {ADAPTED, "model.layers.1.mlp.down_proj.weight"}


@pytest.mark.parametrize("whole", [True, False])
def test_the_tokenizer_of_an_adapter(
    whole: bool, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """As in transformers, it is used if it is there; settings without a tokenizer are named."""
    hub, adapter = tmp_path / "base", tmp_path / "adapter"
    shutil.copytree(base, hub)
    files.write_json(hub / "tokenizer_config.json", {"bos_token": "<|im_start|>"})
    described = {"do_sample": True, "repetition_penalty": 1.05}
    files.write_json(hub / "generation_config.json", described)
    write_adapter(adapter, {"base_model_name_or_path": str(hub)})
    settings = {"bos_token": "<|im_end|>", "model_max_length": 77}
    files.write_json(adapter / "tokenizer_config.json", settings)
    (adapter / "chat_template.jinja").write_text("{{ messages }}")
    (adapter / "README.md").write_text("something")
    if whole:
        shutil.copy(base / "tokenizer.json", adapter)
    run("--from=hf", str(adapter), "--to=brt", str(tmp_path / "run"))
    run("--from=brt", str(tmp_path / "run"), "--to=hf", str(tmp_path / "back"), "--plain")
    said = capsys.readouterr().out
    assert brt.load(tmp_path / "run").tokenizer.bos_id == (2 if whole else 1)
    assert (f"those of the adapter, {adapter}" in said) == whole
    named = "README.md" if whole else "README.md, chat_template.jinja, tokenizer_config.json"
    assert f"{adapter}: not used and not kept: {named}\n" in said
    place = adapter if whole else hub
    for name in ("tokenizer.json", "tokenizer_config.json"):
        back = (tmp_path / "back" / name).read_bytes()
        assert back == ((place if name != "tokenizer.json" else hub) / name).read_bytes()
    assert (tmp_path / "back/chat_template.jinja").is_file() == whole
    again = files.read_json(tmp_path / "back/generation_config.json")
    assert {name: again[name] for name in described} == described
    assert files.read_json(tmp_path / "back/config.json")["vocab_size"] == 300


def test_scales_and_whole_modules_of_an_adapter(base: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", {"use_rslora": True, "base_model_name_or_path": str(base)})
    path = tmp_path / "a/adapter_model.safetensors"
    norm = np.full(32, 0.5, np.float32)
    files.write_file(path, files.read_file(path) | {"base_model.model.model.norm.weight": norm})
    before, after = files.read_tensors(base), reading.describe(tmp_path / "a").arrays()
    expected = before[ADAPTED] + added(tmp_path / "a", scale=4.0)
    np.testing.assert_allclose(after[ADAPTED], expected, rtol=1e-6)
    np.testing.assert_array_equal(after["model.norm.weight"], norm)


@pytest.mark.slow
def test_commands_and_python_read_an_adapter(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    write_adapter(tmp_path / "a", {"base_model_name_or_path": str(base)})
    run("--from=hf", str(tmp_path / "a"), "--to=brt", str(tmp_path / "run"))
    assert f"note: the adapter in {tmp_path / 'a'} is added to {base}" in capsys.readouterr().out
    loaded = brt.load(tmp_path / "a", bindings={"Model.window": 32})
    assert f"the adapter in {tmp_path / 'a'} is added" in capsys.readouterr().err
    config = Config(training=Training(init_from=str(tmp_path / "a")))
    started = tasks.from_config(config).load_converted(config, tmp_path / "a").load()
    jax.tree.map(np.testing.assert_array_equal, started, loaded.params)
    converted = brt.load(tmp_path / "run")
    jax.tree.map(np.testing.assert_array_equal, converted.params, loaded.params)
    plain = reading.describe(base).params()
    changed = jax.tree.map(lambda one, other: np.any(one != other), loaded.params, plain)
    assert any(jax.tree.leaves(changed))


Q_PROJ = "model.layers.{}.self_attn.q_proj.lora_{}"


@pytest.mark.parametrize(
    ("described", "array", "message"),
    [
        ({"peft_type": "IA3"}, (), "peft_type = 'IA3' is not read"),
        ({"use_dora": True}, (), "use_dora = True is not read; merge the adapter into its base"),
        ({"alpha_pattern": {"q_proj": 2}}, (), "alpha_pattern"),
        ({"alora_invocation_tokens": [1]}, (), "alora_invocation_tokens"),
        ({"a_key_of_tomorrow": {"x": 1}}, (), "a_key_of_tomorrow"),
        ({"init_lora_weights": "pissa"}, (), "init_lora_weights = 'pissa' is not read"),
        ({"r": "4"}, (), "adapter_config.json: r is"),
        ({}, (Q_PROJ.format(9, "A.weight"), 4, 32), "has no place in the model"),
        ({}, (Q_PROJ.format(1, "magnitude_vector"), 32), "has no place"),
        ({}, (Q_PROJ.format(0, "A.weight"), 4, 32), r"\(4, 32\) and \(0,\)"),
        ({}, (Q_PROJ.format(1, "B.weight"), 64, 4), r"\(64, 32\), not \(32, 32\)"),
        ({}, ("model.norm.weight", 33), r"\(33,\), not \(32,\)"),
    ],
)
def test_other_adapters_are_refused_with_a_remedy(
    described: dict[str, Any], array: tuple, message: str, base: Path, tmp_path: Path
) -> None:
    write_adapter(tmp_path / "a", {"base_model_name_or_path": str(base), **described})
    path = tmp_path / "a/adapter_model.safetensors"
    if array:
        name, *shape = array
        extra = {f"base_model.model.{name}": np.ones(shape, np.float32)}
        files.write_file(path, files.read_file(path) | extra)
    with pytest.raises(CheckpointError, match=message):
        reading.describe(tmp_path / "a").arrays()


def test_an_adapter_without_its_base_says_how_to_give_it(base: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "a")
    for call in (brt.load, lambda path: read_for_training(path)):
        with pytest.raises(CheckpointError, match="write the path of the model there, or move"):
            call(tmp_path / "a")
    shutil.copytree(base, tmp_path / "base")
    shutil.move(tmp_path / "a", tmp_path / "base/a")
    assert reading.describe(tmp_path / "base/a").directory == tmp_path / "base"


def read_for_training(path: Path) -> Any:
    config = Config(training=Training(init_from=str(path)))
    return tasks.from_config(config).load_converted(config, path)


@pytest.mark.parametrize("call", [brt.load, read_for_training])
def test_a_directory_of_checkpoints_names_one(call: Callable, base: Path, tmp_path: Path) -> None:
    for step in (500, 1500):
        shutil.copytree(base, tmp_path / f"out/checkpoint-{step}")
    with pytest.raises(CheckpointError, match="2 of its subdirectories are models; .*-1500"):
        call(tmp_path / "out")
    assert call(tmp_path / "out/checkpoint-1500")


@pytest.mark.parametrize("prefix", ["_orig_mod.", "base_model.model.", "model.", "module.x.y."])
def test_names_inside_of_a_wrapper_are_read(prefix: str, base: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(base / name, tmp_path)
    arrays = {prefix + name: x for name, x in files.read_tensors(base).items()}
    files.write_tensors(tmp_path, arrays)
    found = reading.describe(tmp_path).params()
    jax.tree.map(np.testing.assert_array_equal, found, reading.describe(base).params())
    # Adapters beside the matrices, which were not added to them, are refused with a remedy.
    for adapted in ("q_proj.base_layer.weight", "q_proj.lora_A.default.weight"):
        name = f"{prefix}model.layers.0.self_attn.{adapted}"
        files.write_tensors(tmp_path, arrays | {name: np.zeros((2, 2), np.float32)})
        with pytest.raises(CheckpointError, match="merge_and_unload"):
            reading.describe(tmp_path).params()


@pytest.fixture
def adapters_of_run(base: Path, tmp_path: Path) -> tuple[ExportSource, Path]:
    """Returns what a run with random adapters exports, and the directory of its base."""
    decoder = reading.describe(base, WindowChoice(64, 0))
    kernels = ("*/queries", "*/values", "*/output", "*/mlp_*")
    config = Config(
        model=decoder.model,
        adapter=Adapter(rank=2, alpha=3.0, kernels=kernels),
        training=Training(init_from=str(base)),
    )
    rng = np.random.default_rng(1)
    shapes = jax.eval_shape(lambda: nn.meta.unbox(initial_params(config)))
    factors = trainable.split_adapters(shapes)[1]
    factors = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), np.float32), factors)
    whole = {"norm": jnp.linspace(0.5, 1.5, 32)}
    params = {**decoder.params(), **whole, trainable.ADAPTERS: factors}
    merged = merged_params(config, params)
    trained = factors | whole
    source = ExportSource(tmp_path, config, merged, lambda: decoder.tokenizer, adapters=trained)
    return source, base


def assert_read_as(directory: Path, source: ExportSource) -> None:
    found = reading.describe(directory, WindowChoice(64, 0)).params()
    for path, array in flatten_dict(found).items():
        np.testing.assert_allclose(array, flatten_dict(dict(source.params))[path], atol=1e-6)


def test_adapters_of_a_run_are_read_as_they_were(
    adapters_of_run: tuple[ExportSource, Path], tmp_path: Path
) -> None:
    source, base = adapters_of_run
    exported = LanguageModeling().export(source)
    list(converting.to_hf(source.path, exported, tmp_path / "adapter", verified=False))
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "tokenizer.json",
    }  # fmt: skip
    described = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == str(base)
    assert_read_as(tmp_path / "adapter", source)


def test_the_base_of_adapters_is_found_as_the_note_says(
    adapters_of_run: tuple[ExportSource, Path], tmp_path: Path
) -> None:
    source, base = adapters_of_run
    start = tmp_path / "the run"
    run("--from=hf", str(base), "--to=brt", str(start))

    def export(place: Path) -> list[str]:
        training = dataclasses.replace(source.config.training, init_from=str(place))
        config = dataclasses.replace(source.config, training=training)
        exported = LanguageModeling().export(source._replace(config=config))
        return list(
            converting.to_hf(source.path, exported, tmp_path / f"of {place.name}", verified=False)
        )

    (note,) = (line for line in export(start) if "PEFT needs" in line)
    command = shlex.split(note.partition("brt.convert ")[2].partition(" writes it")[0])
    target = tmp_path / "BASE"
    flags = [str(target) if word == "BASE" else word for word in command]
    run(*flags)
    path = tmp_path / "of the run/adapter_config.json"
    files.write_json(path, files.read_json(path) | {"base_model_name_or_path": str(target)})
    assert_read_as(path.parent, source)
    gone = " ".join(export(tmp_path / "gone"))
    assert "gone is not here" in gone and "--from=brt" not in gone


def test_runs_that_trained_more_than_adapters_are_refused(base: Path, tmp_path: Path) -> None:
    run("--from=hf", str(base), "--to=brt", str(tmp_path / "run"))
    flags = ["--from=brt", str(tmp_path / "run"), "--to=hf", str(tmp_path / "out"), "--adapter"]
    with pytest.raises(ConfigError, match="has no low-rank adapters"):
        run(*flags)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_peft_computes_what_brt_computes(
    adapters_of_run: tuple[ExportSource, Path], tmp_path: Path
) -> None:
    """In both directions: adapters that brt writes, and adapters that PEFT writes."""
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    source, base = adapters_of_run
    exported = LanguageModeling().export(source)
    lines = list(converting.to_hf(source.path, exported, tmp_path / "ours", verified=True))
    assert any(line.startswith("logits against transformers") for line in lines)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    model = peft.PeftModel.from_pretrained(model, tmp_path / "ours").eval()
    tokens = exporting.document(source.config.model)
    found = model(torch.tensor(tokens[None], dtype=torch.long)).logits[0].detach().numpy()
    expected = exporting.brt_logits(source.params, source.config.model, tokens)
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())

    settings = peft.LoraConfig(
        r=3, target_modules=["k_proj", "gate_proj"], modules_to_save=["norm"],
        rank_pattern={"gate_proj": 5}, use_rslora=True, init_lora_weights=False,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    model = peft.get_peft_model(model, settings).eval()
    model.save_pretrained(tmp_path / "theirs")
    decoder = reading.describe(tmp_path / "theirs", WindowChoice(64, 0))
    found = exporting.brt_logits(decoder.params(), decoder.model, tokens)
    expected = model(torch.tensor(tokens[None], dtype=torch.long)).logits[0].detach().numpy()
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())
