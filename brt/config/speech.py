"""Utterances with their transcripts, for an encoder that learns by CTC."""

import dataclasses
from typing import Literal

from brt.config.checks import check, check_finite, check_not_negative, check_positive, settle_rows
from brt.config.fields import fixed, free, held_out, sources


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speech:
    """Where utterances come from, what becomes frames and tokens, how transcripts are written.

    A source is one of

        PATH.npz              arrays `features` (frames, width), `lengths`, `ids`, `transcripts`,
                              perhaps `speakers`: utterances one after another
        PATH.tsv[:SPLIT]      a table of wav files with the columns `file` and `transcript`,
                              perhaps `speaker`; of its rows those with this `split`
        PATH                  a Kaldi-style directory: `text`, `wav.scp` or `feats.scp`, perhaps
                              `utt2spk`
        generated:NAME/COUNT  made up, as brt/tasks/speech_recognition/data/generated.py says
    """

    train: tuple[str, ...] = sources(("generated:train/1000",))
    # part:SHARE: of train's rows; auto: the default's where train is, else part:0.05; (): none
    validation: tuple[str, ...] = held_out(("generated:validation/100",))
    test: tuple[str, ...] = held_out(("generated:test/100",))  # the same
    # of transcripts: what is a token
    unit: Literal["characters", "words"] = fixed("characters", cached=True)
    # so many recordings of a speaker, in mixed order, are one utterance
    join: int = fixed(1, cached=True)
    # training: join all of them so often, in another order each time
    join_orders: int = fixed(1, cached=True)
    # samples a second of wav files; 0: as train has them, which a run keeps
    sample_rate: int = fixed(0, cached=True)
    mel_bands: int = fixed(40, cached=True)  # of a wav file's frame
    window_ms: float = fixed(25.0, cached=True)  # of a wav file that a frame describes
    # from frame to frame, also where features are read from files
    shift_ms: float = fixed(10.0, cached=True)
    # each feature's mean is 0, its deviation 1, within what is named
    normalization: Literal["none", "utterance", "speaker"] = fixed("utterance", cached=True)
    stack: int = fixed(1, cached=True)  # frames side by side that become one, after normalization
    stride: int = fixed(1, cached=True)  # only every so many-th of these is kept
    # numbers of kept frames that batches are padded to; (): one
    buckets: tuple[int, ...] = fixed((), cached="longest")
    # utterances too short for CTC, or too long
    errors: Literal["refuse", "skip"] = free("refuse", cached=True)
    time_masks: int = free(0)  # SpecAugment: how many times are masked in training
    time_mask_frames: int = free(20)  # the longest
    feature_masks: int = free(0)  # SpecAugment: how many bands of features
    feature_mask_width: int = free(8)  # the widest
    beams: int = free(1)  # 1: the best token of every frame; more: prefix beam search
    cache_dir: str = free("", path="written")  # "": $XDG_CACHE_HOME/brt or ~/.cache/brt

    def __post_init__(self) -> None:
        check_finite(self)
        settle_rows(self)
        check(bool(self.train), "Speech.train names no source")
        check_positive(
            self, "join", "join_orders", "mel_bands", "window_ms", "shift_ms", "stack", "stride",
            "time_mask_frames", "feature_mask_width", "beams",
        )  # fmt: skip
        check_not_negative(self, "sample_rate", "time_masks", "feature_masks")
        check(
            self.join > 1 or self.join_orders == 1,
            f"Speech.join_orders = {self.join_orders} says how often recordings are joined; set "
            "Speech.join above 1, or leave it out",
        )
        check(
            not self.buckets
            or (min(self.buckets) > 0 and list(self.buckets) == sorted({*self.buckets})),
            f"Speech.buckets = {self.buckets} must ascend and be above 0",
        )

    @property
    def longest(self) -> int:
        """Kept frames of the longest utterance that is read; 0: there is no limit."""
        return self.buckets[-1] if self.buckets else 0
