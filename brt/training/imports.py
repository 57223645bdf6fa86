"""Writes a decoder of Hugging Face as a run at step 0, which every command of brt opens."""

from collections.abc import Iterator
from pathlib import Path

from brt.checkpointing.writer import CheckpointWriter
from brt.config import Config, Data, Training
from brt.config_io import config_text, saved_json
from brt.data import tokenizers
from brt.data.tokenizers import Tokenizer
from brt.errors import CheckpointError, DataError
from brt.interop.huggingface import files
from brt.interop.huggingface.causal import config as causal_config
from brt.interop.huggingface.causal import verify, weights
from brt.interop.huggingface.causal.config import Window
from brt.interop.pretrained import parameter_count
from brt.training import workdir as workdirs
from brt.training.workdir import Workdir


def is_decoder(directory: Path) -> bool:
    """Returns True if a directory in Hugging Face's format has a decoder that brt reads."""
    path = directory / "config.json"
    return path.is_file() and files.read_json(path).get("model_type") in causal_config.FAMILIES


def from_hf(source: Path, target: Path, *, verified: bool, reading: Window) -> Iterator[str]:
    """Converts a decoder of Hugging Face to a run, and yields lines that report what was done.

    Args:
      source: the directory in Hugging Face's format.
      target: the run directory to write.
      verified: compare arrays and logits with those of the original.
      reading: the window and the sinks of the layers that have no window of their own.

    Raises:
      ConfigError: `target` is not empty.
      CheckpointError: `source` cannot be converted, or with `verified` the result differs.
      DataError: the tokenizer of `source` cannot be used.
    """
    described = files.read_json(source / "config.json")
    model = causal_config.from_theirs(described, reading)
    arrays = files.read_tensors(source)
    params = weights.import_arrays(arrays, model)
    tokenizer = read_tokenizer(source)
    if tokenizer.vocab_size > model.vocab_size:
        raise CheckpointError(
            f"the tokenizer of {source} has {tokenizer.vocab_size:,} ids, but config.json says "
            f"vocab_size = {model.vocab_size:,}"
        )
    with files.new_directory(target) as directory:
        run = Workdir(directory)
        run.tokenizer.mkdir()
        name, content = tokenizer.file
        workdirs.write_bytes(run.tokenizer / name, content)
        config = Config(
            model=model,
            data=Data(tokenizer=str((Workdir(target).tokenizer / name).absolute())),
            training=Training(
                segment_length=max(model.window, model.block_length), batch_size=1, loss_chunk=256
            ),
        )
        workdirs.write_text(run.config_gin, config_text(config))
        workdirs.write_json(run.config_json, saved_json(config))
        meta = {"config": saved_json(config), "tokenizer": tokenizer.fingerprint, "seed": 0}
        with CheckpointWriter(run.checkpoints) as writer:
            writer.save(0, {"params": params, "model_state": {}}, meta)
        yield (
            f"{source}: {described['model_type']}, {model.layers} layers, width {model.model_dim}, "
            f"{parameter_count(params):,} parameters"
        )
        yield f"window {model.window}, sinks {model.sinks}, blocks of {model.block_length} tokens"
        yield f"tokenizer: {name}, documents begin with id {tokenizer.bos_id}"
        if verified:
            exported = dict(weights.export_arrays(params, model))
            yield from verify.compare(params, model, source, arrays, exported)
    yield f"wrote {target}"


def read_tokenizer(directory: Path) -> Tokenizer:
    """Returns the tokenizer of a directory in Hugging Face's format.

    Raises:
      DataError: the directory has none that keeps every byte of a text.
    """
    reasons = []
    for name in ("tokenizer.json", "tokenizer.model"):
        if (directory / name).is_file():
            try:
                return tokenizers.load(str(directory / name))
            except DataError as error:
                reasons.append(str(error))
    if reasons:
        raise DataError("; ".join(reasons))
    raise DataError(f"{directory} has neither tokenizer.json nor tokenizer.model")
