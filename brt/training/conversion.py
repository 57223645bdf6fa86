"""Converts models of brt to and from other formats, such as that of Hugging Face."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from brt import tasks
from brt.checkpointing import reader
from brt.checkpointing.reader import warn_on_stderr
from brt.config import Config, Data, Training
from brt.config_io import config_text, saved_json
from brt.data import originals
from brt.errors import CheckpointError, ConfigError
from brt.interop.exporting import ExportFormat, ExportSource, no_export_format
from brt.interop.huggingface import convert, files
from brt.interop.huggingface.causal import reading, weights
from brt.interop.huggingface.causal.config import WindowChoice
from brt.interop.huggingface.causal.export import compare
from brt.interop.huggingface.causal.reading import PretrainedDecoder
from brt.interop.pretrained import parameter_count
from brt.training import saved_model, trainable
from brt.training import workdir as workdirs
from brt.training.saved_model import SavedModel
from brt.training.state import merged_params
from brt.training.workdir import Workdir


def export(directory: Path, *, plain: bool = False, adapter: bool = False) -> ExportFormat:
    """Returns the model of a directory in a format that other libraries can read.

    The model is that of a run's newest checkpoint, or of weights that brt.convert wrote. `plain`
    exports a language model as a class of the library transformers, even if this class attends to
    the whole context in layers where the model of brt has a window. `adapter` exports the low-rank
    adapters of the run alone, in PEFT's format.
    """
    if not reader.present(Workdir(directory).checkpoints):
        if adapter:
            raise _no_adapters(directory)
        return convert.load_converted(directory)
    workdir, checkpoint, config = saved_model.load_config(directory)
    task = tasks.from_config(config)
    if not task.exports:
        raise no_export_format(directory)
    if adapter and not config.adapter.rank:
        raise _no_adapters(directory)
    if adapter and not config.training.init_from:
        raise ConfigError(
            f"{directory} started from random weights, so that its adapters belong to no other "
            "model; export the whole model, without --adapter"
        )
    model = saved_model.load_unmerged(workdir, checkpoint, config)
    with model.on_devices():
        merged = merged_params(config, model.params)
    trained, _ = trainable.split(model.params, trainable.patterns(config))
    whole, factors = trainable.split_adapters(trained)
    trained = trainable.merge(factors, whole) if adapter else {}
    return task.export(
        ExportSource(
            directory, config, merged, lambda: saved_model.tokenizer(model), plain, trained
        )
    )


def _no_adapters(directory: Path) -> ConfigError:
    return ConfigError(
        f"{directory} has no low-rank adapters (Adapter.rank = 0); export it without --adapter"
    )


def from_hf(source: Path, target: Path, *, verified: bool, window: WindowChoice) -> Iterator[str]:
    """Converts a decoder in Hugging Face's format to a run directory with a checkpoint at step 0.

    Yields lines of text for the user. If `verified` is True, the arrays and the logits of the
    converted model are compared with those of the original. `window` has the window and the number
    of sinks (first tokens that stay visible) with which the model reads text.
    """
    from brt.checkpointing.writer import CheckpointWriter  # It imports Orbax.

    decoder = reading.describe(source, window)
    model, tokenizer = decoder.model, decoder.tokenizer
    arrays = decoder.arrays()
    params = weights.import_arrays(arrays, model)
    with files.new_directory(target) as directory:
        run = Workdir(directory)
        run.tokenizer.mkdir()
        for name, content in originals.stored(tokenizer.file, tokenizer.beside).items():
            (run.tokenizer / name).parent.mkdir(parents=True, exist_ok=True)
            workdirs.write_bytes(run.tokenizer / name, content)
        name = tokenizer.file[0]
        config = config_of(decoder, Workdir(target).tokenizer / name)
        workdirs.write_text(run.config_gin, config_text(config))
        workdirs.write_json(run.config_json, saved_json(config))
        with CheckpointWriter(run.checkpoints) as writer:
            writer.save(0, {"params": params, "model_state": {}}, metadata(decoder, config))
        yield (
            f"{source}: {decoder.described['model_type']}, {model.layers} layers, width "
            f"{model.model_dim}, {parameter_count(params):,} parameters"
        )
        sinks, block = model.sliding.sinks, model.block_length
        yield f"window {model.window}, sinks {sinks}, blocks of {block} tokens"
        if beyond := model.beyond_context():
            yield f"note: {beyond}"
        yield f"tokenizer: {name}, documents begin with id {tokenizer.bos_id}"
        yield from (f"note: {note}" for note in decoder.notes)
        if verified:
            exported = dict(weights.export_arrays(params, model))
            yield from compare(params, model, source, arrays, exported)
    yield f"wrote {target}"


def config_of(decoder: PretrainedDecoder, tokenizer: Path) -> Config:
    """Returns the config of a run whose model is this decoder."""
    length = max(decoder.model.window, decoder.model.block_length)
    return Config(
        model=decoder.model,
        sampling=decoder.sampling,
        data=Data(tokenizer=str(tokenizer.absolute())),
        training=Training(segment_length=length, batch_size=1, loss_chunk=256),
    )


def open_model(directory: Path, step: int | None, change: Callable[[Config], Config]) -> SavedModel:
    """Returns the trained model of a run, or a decoder in Hugging Face's format.

    `change` is a function from the config of the model to the config that the user requests. A
    `step` of None stands for the newest checkpoint.
    """
    if not directory.is_dir():
        raise ConfigError(f"there is no directory {directory}; name the directory of a run")
    if not Workdir(directory).checkpoints.is_dir():
        if reading.is_decoder(directory):
            if step is not None:
                raise CheckpointError(f"{directory} is in Hugging Face's format and has no steps")
            return _load(directory, change)
        files.check_is_model(directory)
    return saved_model.open_run(directory, step, change)


def _load(directory: Path, change: Callable[[Config], Config]) -> SavedModel:
    """Returns a decoder in Hugging Face's format as a model, on the default device."""
    decoder = reading.describe(directory)
    for note in decoder.notes:
        warn_on_stderr(f"note: {note}")
    config = config_of(decoder, decoder.tokenizer_file)
    changed = change(config)
    params = decoder._replace(model=changed.model).params()
    return SavedModel(
        Workdir(directory), 0, changed, metadata(decoder, config), params,
        own_tokenizer=decoder.tokenizer,
    )  # fmt: skip


def metadata(decoder: PretrainedDecoder, config: Config) -> dict[str, Any]:
    """Returns metadata for a decoder's checkpoint, with the seed 0 in place of a run's seed."""
    return {"config": saved_json(config), "tokenizer": decoder.tokenizer.fingerprint, "seed": 0}
