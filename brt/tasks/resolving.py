"""What depends on data and machine, written into a config."""

import dataclasses
import math

from brt.config import Config
from brt.errors import ConfigError
from brt.layers.basic import compute_dtype
from brt.tasks.weights import Tokenizer


def written_out(config: Config, section: str, tokenizer: Tokenizer, ids: int) -> Config:
    """The config with the vocabulary size and the dtype of its model.

    Args:
      section: of the model, as `Config` names it.
      ids: that the model has to know.

    Raises:
      ConfigError: the size is set, and too small.
    """
    model = getattr(config, section)
    wanted, masks = model.vocab_size, ids > tokenizer.vocab_size
    if wanted and wanted < ids:
        raise ConfigError(
            f"{type(model).__name__}.vocab_size = {wanted} is too small for the tokenizer "
            f"{tokenizer.name} with {ids} ids{', the mask included' * masks}; set it to 0 to take "
            "the tokenizer's"
        )
    dtype = compute_dtype(model).name
    written = dataclasses.replace(model, vocab_size=wanted or ids, dtype=dtype)
    return dataclasses.replace(config, **{section: written})


def with_steps(config: Config, steps_per_epoch: int) -> Config:
    """Training.steps of Training.epochs, where those are set.

    Raises:
      ConfigError: the warm-up would be longer.
    """
    t = config.training
    if not t.epochs:
        return config
    steps = max(math.ceil(t.epochs * steps_per_epoch), 1)
    warmup, schedule = config.optimizer.warmup_steps, config.optimizer.schedule
    if schedule in ("cosine", "linear") and warmup >= steps:
        raise ConfigError(
            f"Optimizer.warmup_steps = {warmup} must be below the {steps} steps that "
            f"Training.epochs = {t.epochs} makes of these data"
        )
    return dataclasses.replace(config, training=dataclasses.replace(t, steps=steps))
