"""All settings of brt, as frozen dataclasses that check their values.

Each dataclass is a section of .gin files, and its fields are settings. The comment next to a field
or above it is the field's documentation, which `--print_config` shows. The default of a field is
written with a function of `brt.config.fields`. The function also declares whether a resumed run may
change the setting, whether a run that starts from weights takes the value from the weights, and
whether prepared data depend on the setting. `__post_init__` of a section checks the settings of the
section, and `Config.__post_init__` checks settings of two sections against each other. A task
checks the settings that it reads.
"""

import dataclasses

from brt.config.checks import check
from brt.config.data import Data, Pairs, Questions, Sentences, Speech
from brt.config.encoder import Attention, Encoder
from brt.config.model import Model
from brt.config.seq2seq import CrossAttention, Decoding, Seq2Seq
from brt.config.training import (
    Adapter,
    Checkpoint,
    Distillation,
    Evaluation,
    Kernels,
    Logging,
    Mesh,
    Optimizer,
    Sampling,
    Training,
)

__all__ = [
    "SECTIONS", "Adapter", "Attention", "Checkpoint", "Config", "CrossAttention", "Data",
    "Decoding", "Distillation", "Encoder", "Evaluation", "Kernels", "Logging", "Mesh", "Model",
    "Optimizer",
    "Pairs", "Questions", "Sampling", "Sentences", "Seq2Seq", "Speech", "Training",
]  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run. Each field is a section of .gin files."""

    model: Model = Model()
    data: Data = Data()
    training: Training = Training()
    optimizer: Optimizer = Optimizer()
    adapter: Adapter = Adapter()
    checkpoint: Checkpoint = Checkpoint()
    logging: Logging = Logging()
    evaluation: Evaluation = Evaluation()
    sampling: Sampling = Sampling()
    mesh: Mesh = Mesh()
    kernels: Kernels = Kernels()
    seq2seq: Seq2Seq = Seq2Seq()
    cross_attention: CrossAttention = CrossAttention()
    pairs: Pairs = Pairs()
    decoding: Decoding = Decoding()
    distillation: Distillation = Distillation()
    encoder: Encoder = Encoder()
    attention: Attention = Attention()
    speech: Speech = Speech()
    sentences: Sentences = Sentences()
    questions: Questions = Questions()

    def __post_init__(self) -> None:
        check(
            self.optimizer.schedule not in ("cosine", "linear")
            # With `epochs`, the number of steps depends on the data, which have not been read yet.
            # `brt.tasks.weights.with_steps` compares it with the warm-up steps later.
            or bool(self.training.epochs)
            or self.optimizer.warmup_steps < self.training.steps,
            f"Optimizer.warmup_steps = {self.optimizer.warmup_steps} must be below "
            f"Training.steps = {self.training.steps}",
        )

    @property
    def evaluation_segment_length(self) -> int:
        """Number of tokens of each document that evaluation reads at a time."""
        return self.evaluation.segment_length or self.training.segment_length


SECTIONS = {
    field.type.__name__: field.name
    for field in dataclasses.fields(Config)
    if isinstance(field.type, type)
}  # The keys are names of sections, the values the fields of `Config`: {"Model": "model", ...}.
