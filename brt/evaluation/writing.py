"""A text from a workdir to standard output."""

import sys
from pathlib import Path
from typing import TextIO

from brt import tasks
from brt.config_io import config_json
from brt.errors import DataError
from brt.tasks.protocol import WriteOptions
from brt.training import saved
from brt.training.saved import SavedModel


def read_prompt(prompt: str | None, prompt_file: str | None, resumed: bool) -> str:
    """The text to continue.

    Raises:
      DataError: it is empty, or the file cannot be read; a loaded state needs no prompt.
    """
    if prompt_file:
        try:
            prompt = (
                sys.stdin.read() if prompt_file == "-" else Path(prompt_file).read_text("utf-8")
            )
        except UnicodeDecodeError as error:
            raise DataError(
                f"--prompt_file={prompt_file} is not UTF-8 at byte {error.start}"
            ) from error
        except OSError as error:
            raise DataError(f"--prompt_file={prompt_file}: {error.strerror}") from error
    if not prompt and not resumed:
        raise DataError(
            "the prompt is empty; give some text with --prompt or --prompt_file, or go on from "
            "--load_state"
        )
    return prompt or ""


def write(model: SavedModel, prompt: str, options: WriteOptions, out: TextIO | None = None) -> None:
    """Writes what the model makes of the prompt.

    Raises:
      ConfigError: the model writes no text.
      CheckpointError: it knows another tokenizer.
      DataError: `options.load_state` is not a state of this model.
    """
    task, config = tasks.of(model.config), model.config
    if not task.writes:
        raise task.silent()
    tokenizer = saved.tokenizer(model)
    identity = {"step": model.step, "model": config_json(config)["Model"],
                "tokenizer": tokenizer.fingerprint}  # fmt: skip
    task.write(
        config, model.params, tokenizer, prompt, options, out or sys.stdout, identity=identity,
        model_state=model.model_state,
    )  # fmt: skip
