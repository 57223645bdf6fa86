"""Fills in settings that depend on the data and the machine."""

import dataclasses
import math

from brt.config import Config
from brt.errors import ConfigError
from brt.layers.basic import compute_dtype
from brt.tasks.weights import Tokenizer


def fill_in_vocabulary(config: Config, section: str, tokenizer: Tokenizer, ids: int) -> Config:
    """Returns the config with the model's vocabulary size and dtype filled in.

    The model needs `ids` token ids; its section is the field `section` of the config. Raises
    ConfigError if the configured vocabulary size is too small.
    """
    model = getattr(config, section)
    wanted, masks = model.vocab_size, ids > tokenizer.vocab_size
    if wanted and wanted < ids:
        raise ConfigError(
            f"Model.vocab_size = {wanted} is too small for the tokenizer "
            f"{tokenizer.name} with {ids} ids{', the mask included' * masks}; set it to 0 to take "
            "the tokenizer's"
        )
    dtype = compute_dtype(model).name
    resolved = dataclasses.replace(model, vocab_size=wanted or ids, dtype=dtype)
    return dataclasses.replace(config, **{section: resolved})


def with_steps(config: Config, steps_per_epoch: int) -> Config:
    """Returns the config with Training.steps computed from Training.epochs, if epochs are set.

    Raises ConfigError if a decaying schedule would not have a shorter warm-up than the training.
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
