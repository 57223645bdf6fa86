"""What a run may change when it goes on."""

from brt.config import Config
from brt.config_io import difference
from brt.errors import ConfigError

# Fields that may change between a checkpoint and its resumption; all others decide what the
# arrays are or what they mean.
_FREE_SECTIONS = (
    "Checkpoint.", "Evaluation.", "Sampling.", "Mesh.", "Kernels.", "Decoding.", "Attention.",
)  # fmt: skip
_FREE_FIELDS = {
    "Model.layer_unroll", "Model.block_unroll", "Model.remat", "Model.dropout",
    "Training.steps", "Training.epochs", "Training.label_smoothing", "Training.init_from",
    "Training.gradient_accumulation", "Training.loss_chunk",
    "Training.log_every", "Training.evaluate_every", "Training.sample_every",
    "Training.probe_every", "Training.plots",
    "Optimizer.learning_rate", "Optimizer.schedule", "Optimizer.warmup_steps",
    "Optimizer.final_learning_rate", "Optimizer.weight_decay",
    "Data.cache_dir", "Data.store", "Data.train", "Data.validation", "Data.test",
    "Data.validation_fraction", "Data.test_fraction", "Data.tokenizer", "Data.errors",
    "Data.text_field",
    "Pairs.cache_dir", "Pairs.train", "Pairs.validation", "Pairs.test", "Pairs.errors",
    "Pairs.source_field", "Pairs.target_field", "Pairs.id_field", "Pairs.tokenizer",
    "Speech.cache_dir", "Speech.train", "Speech.validation", "Speech.test", "Speech.errors",
    "Speech.beams", "Speech.time_masks", "Speech.time_mask_frames", "Speech.feature_masks",
    "Speech.feature_mask_width",
    "Sentences.cache_dir", "Sentences.train", "Sentences.validation", "Sentences.test",
    "Sentences.errors", "Sentences.first_field", "Sentences.second_field", "Sentences.label_field",
    "Sentences.id_field", "Sentences.header", "Sentences.tokenizer",
    "Questions.cache_dir", "Questions.train", "Questions.validation", "Questions.test",
    "Questions.errors", "Questions.tokenizer", "Questions.max_answer_length",
    "Questions.no_answer_margin",
    "Seq2Seq.dropout", "Seq2Seq.attention_dropout", "Seq2Seq.activation_dropout", "Seq2Seq.remat",
    "Encoder.dropout", "Encoder.attention_dropout", "Encoder.remat",
}  # fmt: skip


def check_resumable(saved: Config, wanted: Config) -> list[str]:
    """Describes what differs from the checkpoint's config.

    Raises:
      ConfigError: a difference that makes another run of it.
    """
    differences = difference(saved, wanted)
    fixed = [
        f"{name} was {old!r} and is {new!r}"
        for name, old, new in differences
        if name not in _FREE_FIELDS and not name.startswith(_FREE_SECTIONS)
    ]
    if fixed:
        raise ConfigError(
            f"this workdir holds another run: {'; '.join(fixed)}; set it back, or choose another "
            "--workdir"
        )
    return [f"{name}: {old!r} -> {new!r}" for name, old, new in differences]
