"""All that a .gin file can say: frozen dataclasses that check themselves.

A field's comment is its documentation (`--print_config` shows it). Settings that
only make sense together are checked in `__post_init__`; settings of two sections
are checked in `Config.__post_init__`.
"""

import dataclasses

from brt.config.attention import Attention
from brt.config.checks import check
from brt.config.data import Data
from brt.config.encoder import Encoder
from brt.config.kernels import Kernels
from brt.config.model import Model
from brt.config.questions import Questions
from brt.config.sentences import Sentences
from brt.config.seq2seq import CrossAttention, Decoding, Pairs, Seq2Seq
from brt.config.speech import Speech
from brt.config.training import Checkpoint, Evaluation, Mesh, Optimizer, Sampling, Training

__all__ = [
    "SECTIONS", "UNREAD", "Attention", "Checkpoint", "Config", "CrossAttention", "Data", "Decoding",
    "Encoder", "Evaluation", "Kernels", "Mesh", "Model", "Optimizer", "Pairs", "Questions",
    "Sampling", "Sentences", "Seq2Seq", "Speech", "Training",
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
    kernels: Kernels = Kernels()
    seq2seq: Seq2Seq = Seq2Seq()
    cross_attention: CrossAttention = CrossAttention()
    pairs: Pairs = Pairs()
    decoding: Decoding = Decoding()
    encoder: Encoder = Encoder()
    attention: Attention = Attention()
    speech: Speech = Speech()
    sentences: Sentences = Sentences()
    questions: Questions = Questions()

    def __post_init__(self) -> None:
        if self.training.objective == "seq2seq":
            self._check_pairs()
        elif self.training.objective == "language_modeling":
            self._check_segments()
        elif self.training.objective == "masked_language_modeling":
            self._check_masked_segments()
        elif self.training.objective == "ctc":
            self._check_not_smoothed("CTC")
        elif self.training.objective == "classification":
            self._check_encoder(("Sentences.max_length", self.sentences.max_length))
        elif self.training.objective == "regression":
            self._check_numbers()
        elif self.training.objective == "spans":
            self._check_questions()
        lanes = self.training.batch_size // self.training.gradient_accumulation
        check(
            lanes % self.mesh.data == 0,
            f"Training.batch_size / Training.gradient_accumulation = {lanes} lanes cannot be "
            f"shared equally by Mesh.data = {self.mesh.data} devices",
        )
        check(
            self.optimizer.schedule not in ("cosine", "linear")
            or bool(self.training.epochs)  # the steps are not known yet
            or self.optimizer.warmup_steps < self.training.steps,
            f"Optimizer.warmup_steps = {self.optimizer.warmup_steps} must be below "
            f"Training.steps = {self.training.steps}",
        )

    def _check_segments(self) -> None:
        model = self.model
        check(
            self.attention.kind == "full",
            f"Attention.kind = {self.attention.kind!r} looks at the whole of a sequence, which a "
            "causal model must not; leave it out, and name layers in Model.clustered_layers",
        )
        for name, length in (
            ("Training.segment_length", self.training.segment_length),
            ("Evaluation.segment_length", self.evaluation_segment_length),
        ):
            check(
                length % model.window == 0,
                f"{name} = {length} must be a multiple of Model.window = {model.window}; "
                f"set it to {max(length // model.window, 1) * model.window}",
            )
            check(
                not model.memorizing_layers or model.memory_size >= length,
                f"Model.memory_size = {model.memory_size} must not be below {name} = {length}",
            )

    def _check_masked_segments(self) -> None:
        self._check_encoder(
            ("Training.segment_length", self.training.segment_length),
            ("Evaluation.segment_length", self.evaluation_segment_length),
        )

    def _check_encoder(self, *lengths: tuple[str, int]) -> None:
        """Of one that reads tokens, in sequences that are so long at most."""
        encoder = self.encoder
        check(
            encoder.features == 0,
            f"Encoder.features = {encoder.features} must be 0 where Training.objective = "
            f"{self.training.objective!r}: it reads tokens",
        )
        for name, length in lengths:
            check(
                encoder.positions != "learned" or length <= encoder.max_positions,
                f"{name} = {length} is above Encoder.max_positions = {encoder.max_positions}; "
                "lower it, or raise that (of pretrained weights: with brt.convert "
                "--extend_positions)",
            )
            self.attention.check_length(length, f"{name} = {length}")

    def _check_not_smoothed(self, what: str) -> None:
        smoothing = self.training.label_smoothing
        check(
            smoothing == 0,
            f"Training.label_smoothing = {smoothing} means nothing to {what}; leave it out",
        )

    def _check_numbers(self) -> None:
        self._check_not_smoothed("regression")
        labels = self.sentences.labels
        check(not labels, f"Sentences.labels = {labels} is for classes; regression reads numbers")
        self._check_encoder(("Sentences.max_length", self.sentences.max_length))

    def _check_questions(self) -> None:
        self._check_not_smoothed("spans")
        self._check_encoder(("Questions.max_length", self.questions.max_length))

    def _check_pairs(self) -> None:
        pairs, model = self.pairs, self.seq2seq
        self.cross_attention.check_lengths(pairs.max_source_length, pairs.max_target_length)
        for name, length in (
            ("Pairs.max_source_length", pairs.max_source_length),
            ("Pairs.max_target_length", pairs.max_target_length),
            ("Decoding.max_length", self.decoding.max_length),
        ):
            check(
                model.family != "bart" or length <= model.max_positions,
                f"{name} = {length} is above Seq2Seq.max_positions = {model.max_positions}, the "
                "positions that BART knows; lower it, or raise that (of pretrained weights: with "
                "brt.convert --extend_positions)",
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

_READ = {
    "language_modeling": ("Model", "Data", "Sampling"),
    "seq2seq": ("Seq2Seq", "CrossAttention", "Pairs", "Decoding"),
    "masked_language_modeling": ("Encoder", "Attention", "Data"),
    "ctc": ("Encoder", "Attention", "Speech"),
    "classification": ("Encoder", "Attention", "Sentences"),
    "regression": ("Encoder", "Attention", "Sentences"),
    "spans": ("Encoder", "Attention", "Questions"),
}  # beside what all objectives read

UNREAD = {
    objective: tuple({name: None for own in _READ.values() for name in own if name not in read})
    for objective, read in _READ.items()
}  # sections that mean nothing, by Training.objective
