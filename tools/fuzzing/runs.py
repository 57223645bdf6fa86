"""Writes example directories of a run, a sweep and converted models, and names their readers.

`tools/fuzz.py` damages the files and passes them to the readers.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import flax.linen as nn
import jax
import tensorstore

from brt import config, tasks, tree_utils, untrusted
from brt.checkpointing import manifest, reader
from brt.checkpointing.writer import CheckpointWriter
from brt.config_io import config_json
from brt.errors import CheckpointError
from brt.interop.huggingface import files
from brt.interop.huggingface.causal import config as causal
from brt.interop.huggingface.causal.reading import generation_settings
from brt.interop.huggingface.encoder_decoder import EncoderDecoder
from brt.sweeping import report as results
from brt.sweeping.directory import PointDirectory
from brt.training import (
    bad_steps,
    data_manifest,
    inspection,
    metrics,
    run_summary,
    saved_model,
)
from brt.training import workdir as workdirs
from brt.training.state import initial_params

STEP = 5
_FROZEN = "params/norm"  # This array is in the directory `frozen` of the checkpoint.
CONFIG = config.Config(
    model=config.Model(
        layers=1, model_dim=8, heads=1, head_dim=8, mlp_dim=8, window=8, vocab_size=256,
    ),
    training=config.Training(segment_length=16, batch_size=1, steps=STEP),
)  # fmt: skip
_SPLIT = {
    "documents": 1, "bytes": 9, "names": ["a.txt"], "sha256": "0" * 64, "held_out": "",
    "sources": [{"name": "a.txt", "bytes": 9, "sha256": "1" * 64}],
}  # fmt: skip
_METER = {
    "tokens_seen": 80, "nats": 1.0, "tokens": 8.0, "norms": 1.0, "steps": 1, "others": {},
    "skipped": 0, "usual": [[5, 1.0]],
}  # fmt: skip
_PROVENANCE = {
    "command": ["brt.train"], "started": "2026", "python": "3", "versions": {"brt": "1"},
    "git": {"commit": "a", "dirty": False}, "host": "a", "platform": "b", "devices": ["cpu:0"],
    "config_changes": [{"step": 3, "changed": ["Model.layers: 1 -> 2"], "allowed": []}],
}  # fmt: skip


class Target(NamedTuple):
    """A file and the function that reads it.

    Attributes:
      path: the file that is damaged.
      read: reads the file, or the directory or the store that the file belongs to.
      of: a glob of the files that the file is an example of, in the directory of a run
        ("run/metrics.jsonl"), a sweep ("sweep/*/point.json") or a converted model
        ("hf/config.json"); "" for files outside of such directories.
    """

    path: Path
    read: Callable[[Path], object]
    of: str = ""


def readers(place: Path) -> dict[str, Target]:
    """Writes the examples below `place`.

    Returns:
      A reader for each file, by the file's path relative to `place`.
    """
    found = {}

    def add(of: str, content: Any, read: Callable[[Path], object]) -> None:
        path = place / of.replace("*", str(STEP))
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is not None:
            text = content if isinstance(content, str) else json.dumps(content)
            path.write_text(text)
        found[str(path.relative_to(place))] = Target(path, read, of)

    run = workdirs.Workdir(place / "run")
    run.path.mkdir(parents=True)
    task = tasks.from_config(CONFIG)
    name, content = task.load_tokenizer(Path("bytes.txt")).file
    run.tokenizer.mkdir()
    (run.tokenizer / name).write_bytes(content)
    _checkpoint(run)
    add("run/config.json", config_json(CONFIG), lambda path: workdirs.saved_config(path.parent))
    add("run/data.json", {"directory": "a", "splits": {"train": _SPLIT}}, lambda path: _data(run))
    add("run/provenance.json", _PROVENANCE, lambda path: run_summary.changes(run))
    add("run/metrics.jsonl", _lines(), lambda path: _numbers(run))
    bad = {"step": 4, "policy": "rollback", "from": 3, "reason": "a", "batch": [{"a": 1}]}
    add("run/bad_batches.jsonl", f"{json.dumps(bad)}\n", bad_steps.read)
    add("run/trackers.json", {"wandb": "a"}, metrics.read_trackers)
    add("run/last_checkpoint.txt", f"{STEP}\n", lambda path: reader.last_saved(run.checkpoints))
    report = {
        "step": STEP, "bits_per_byte": 2.0, "answers": [{"windows": 1, "answers_exact": 0.5}],
        "rouge": {"rouge1": {"f1": 1.0}}, "ablation": {"protocol": {"ablate": "all"}},
    }  # fmt: skip
    report["answers"] = [{"windows": 1, results.EXACT_ANSWERS.name: 0.5}]
    add("run/evaluations/*/validation.json", report, lambda path: _report(path, task))
    rows = [{"document": "a.txt", "bits": 8.5, "bytes": 4}, {"bits": 3, "bytes": 5}]
    text = "\n".join(map(json.dumps, rows))
    add("run/evaluations/*/validation_documents.jsonl", text, results.documents)
    add("run/checkpoints/*/meta.json", None, lambda path: _meta(run))
    add("run/checkpoints/*/MANIFEST.sha256", None, lambda path: _verified(run))
    state = run.checkpoints / str(STEP) / "state"
    largest = max(state.rglob("d/*"), key=lambda path: path.stat().st_size)
    others = ("_METADATA", "manifest.ocdbt", "array_metadatas/process_0")
    for path in (largest, *(state / name for name in others)):
        found[str(path.relative_to(place))] = Target(
            path, lambda path: _arrays(run), "run/checkpoints/*/state/**"
        )
    frozen = run.checkpoints / str(STEP) / "frozen"
    largest = max(frozen.rglob("d/*"), key=lambda path: path.stat().st_size)
    found[str(largest.relative_to(place))] = Target(
        largest, lambda path: _arrays(run), "run/checkpoints/*/frozen/**"
    )
    _zarr(run, add)
    saved_point = {"name": "a", "bindings": {}, "config": config_json(CONFIG)}
    point = saved_point | {"progress": {"status": "failed", "reason": "a", "seconds": 1.0}}
    add("sweep/*/point.json", point, lambda path: _point(path.parent))
    _converted(add)
    return found


def _checkpoint(run: workdirs.Workdir) -> None:
    params = nn.meta.unbox(initial_params(CONFIG))
    state = {"params": params, "model_state": tasks.from_config(CONFIG).initial_model_state(CONFIG)}
    tokenizer = tasks.from_config(CONFIG).load_tokenizer(run.tokenizer / "bytes.txt")
    meta = {
        "seed": 0, "data": {"step": STEP}, "meter": _METER, "config": config_json(CONFIG),
        "tokenizer": tokenizer.fingerprint, "provenance": _PROVENANCE,
    }  # fmt: skip
    with CheckpointWriter(run.checkpoints, keep=1) as writer:
        writer.freeze([_FROZEN], None)
        writer.save(STEP, state, meta)


def _lines() -> str:
    lines = [{"step": s, "perf/time": 1.5, "train/loss": 2.0, "eval/a": None} for s in (1, 2)]
    return "".join(json.dumps(line) + "\n" for line in lines)


def _sealed(run: workdirs.Workdir) -> None:
    """Writes correct checksums of the checkpoint, if it contains only directories and small files.

    Somebody who writes a malicious checkpoint can write matching checksums, too, so the checksums
    must not be the only protection.
    """
    directory = run.checkpoints / str(STEP)
    sums = directory / manifest.NAME
    others = [path for path in directory.rglob("*") if not path.is_dir()]
    if all(path.is_file() and path.stat().st_size < 1 << 30 for path in (*others, sums)):
        with mock.patch("os.fsync"):  # fsync would take most of the time.
            manifest.write(directory)


def _data(run: workdirs.Workdir) -> None:
    data_manifest.describe_splits(data_manifest.read(run).splits)
    data_manifest.check_unchanged(run, {"train": _SPLIT})


def _numbers(run: workdirs.Workdir) -> None:
    found = {"workdir": "", "checkpoints": []}
    found["metrics"] = inspection.last_metrics(run.metrics)
    found["damaged_metrics"] = metrics.damaged_lines(run.metrics)
    inspection.text(found)
    results.median(metrics.read_metrics(run.metrics), "train/loss")


def _report(path: Path, task: Any) -> None:
    results.report(path, task)


def _meta(run: workdirs.Workdir) -> None:
    _sealed(run)
    _verified(run)
    found = saved_model.newest_checkpoint(run.path)
    assert found
    saved_model.config_history(found.meta, saved_model.ConfigChanges(["a"], []))
    _, found, read = saved_model.load_config(run.path)
    data_manifest.read_tokenizer(run, tasks.from_config(read), found.meta["tokenizer"])
    saved_model.check_resumable(read, CONFIG, ())
    tree_utils.differences(found.meta["arrays"], {})


def _verified(run: workdirs.Workdir) -> None:
    found = inspection.survey(run)
    inspection.text(found)
    inspection.check(found)


def _arrays(run: workdirs.Workdir) -> None:
    _sealed(run)
    found = reader.find(run.checkpoints, STEP)
    wanted = {"params": nn.meta.unbox(jax.eval_shape(lambda: initial_params(CONFIG)))}
    reader.restore(run.checkpoints, wanted, STEP, checkpoint=found, partial=True)


def _zarr(run: workdirs.Workdir, add: Callable[..., None]) -> None:
    """Adds a reader for the metadata of one array, which the store of arrays contains.

    The metadata are written to a file, so that they can be damaged like other files. The reader
    copies the file into the store.
    """
    state = run.checkpoints / str(STEP) / "state"
    spec = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{state.absolute()}/"}}
    key = "params/embedding/.zarray"
    good = tensorstore.KvStore.open(spec).result()[key]

    def read(path: Path) -> None:
        store = tensorstore.KvStore.open(spec).result()
        try:
            store[key] = untrusted.read_file(path)
            _arrays(run)
        except OSError as error:
            raise CheckpointError(f"{path}: {error}") from error
        finally:
            store[key] = good

    add("zarr/.zarray", good.decode(), read)


def _point(path: Path) -> None:
    PointDirectory(path).progress()
    PointDirectory(path).config()


_T5 = {
    "model_type": "t5", "num_layers": 1, "d_model": 8, "num_heads": 1, "d_kv": 8, "d_ff": 8,
    "vocab_size": 9, "task_specific_params": {"a": {"num_beams": 2, "prefix": "b"}},
}  # fmt: skip


_SIZES = {
    "vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6, "head_dim": 4,
}  # fmt: skip
_DECODERS = {
    "llama": {
        **_SIZES, "model_type": "llama", "rope_theta": 500.0, "attention_bias": False,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "gemma": {
        **_SIZES, "model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 8, "query_pre_attn_scalar": 4,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
}  # fmt: skip


def _converted(add: Callable[..., None]) -> None:
    """Adds readers for the files of models in the formats of Hugging Face and brt."""

    def theirs(path: Path) -> None:
        one = files.read_json(path.parent / "config.json")
        generation = files.read_json(path.parent / "generation_config.json")
        EncoderDecoder.from_theirs(one, generation, ())

    add("hf/config.json", _T5, lambda path: None)
    add("hf/generation_config.json", {"num_beams": 4, "eos_token_id": 1}, theirs)
    add("hf/config.json", None, theirs)
    for family, described in _DECODERS.items():
        add(
            f"hf/{family}/config.json", described,
            lambda path: causal.read(files.read_json(path), causal.WindowChoice()),
        )  # fmt: skip
    sampled = {"do_sample": True, "temperature": 0.6, "top_k": 20, "eos_token_id": [2, 0]}
    add(
        "hf/llama/generation_config.json", sampled,
        lambda path: generation_settings(path.parent, 32),
    )  # fmt: skip
    weight_map = {"weight_map": {"a": "model-1.safetensors"}}
    add("hf/model.safetensors.index.json", weight_map, files.shards)
