"""All that a .gin file can say: frozen dataclasses that check themselves.

A field's comment is its documentation (`--print_config` shows it). Settings that
only make sense together are checked in `__post_init__`; settings of two sections
are checked in `Config.__post_init__`.
"""

import dataclasses

from brt.config.checks import check
from brt.config.data import Data
from brt.config.model import Model
from brt.config.seq2seq import CrossAttention, Decoding, Pairs, Seq2Seq
from brt.config.training import Checkpoint, Evaluation, Mesh, Optimizer, Sampling, Training

__all__ = [
    "SECTIONS", "Checkpoint", "Config", "CrossAttention", "Data", "Decoding", "Evaluation",
    "Mesh", "Model", "Optimizer", "Pairs", "Sampling", "Seq2Seq", "Training",
]  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """One run: every section, checked against the others."""

    model: Model = Model()
    data: Data = Data()
    training: Training = Training()
    optimizer: Optimizer = Optimizer()
    checkpoint: Checkpoint = Checkpoint()
    evaluation: Evaluation = Evaluation()
    sampling: Sampling = Sampling()
    mesh: Mesh = Mesh()
    seq2seq: Seq2Seq = Seq2Seq()
    cross_attention: CrossAttention = CrossAttention()
    pairs: Pairs = Pairs()
    decoding: Decoding = Decoding()

    def __post_init__(self) -> None:
        window = self.model.window
        for name, length in (
            ("Training.segment_length", self.training.segment_length),
            ("Evaluation.segment_length", self.evaluation_segment_length),
        ):
            check(
                length % window == 0,
                f"{name} = {length} must be a multiple of Model.window = {window}; "
                f"set it to {max(length // window, 1) * window}",
            )
        for name, length in (
            ("Training.segment_length", self.training.segment_length),
            ("Evaluation.segment_length", self.evaluation_segment_length),
        ):
            check(
                not self.model.memorizing_layers or self.model.memory_size >= length,
                f"Model.memory_size = {self.model.memory_size} must not be below {name} = {length}",
            )
        lanes = self.training.batch_size // self.training.gradient_accumulation
        check(
            lanes % self.mesh.data == 0,
            f"Training.batch_size / Training.gradient_accumulation = {lanes} lanes cannot be "
            f"shared equally by Mesh.data = {self.mesh.data} devices",
        )
        check(
            self.optimizer.schedule not in ("cosine", "linear")
            or self.optimizer.warmup_steps < self.training.steps,
            f"Optimizer.warmup_steps = {self.optimizer.warmup_steps} must be below "
            f"Training.steps = {self.training.steps}",
        )

    @property
    def evaluation_segment_length(self) -> int:
        """Tokens of a lane that evaluation reads at a time."""
        return self.evaluation.segment_length or self.training.segment_length


SECTIONS = {
    field.type.__name__: field.name
    for field in dataclasses.fields(Config)
    if isinstance(field.type, type)
}  # {"Model": "model", ...}: the names that a .gin file uses
