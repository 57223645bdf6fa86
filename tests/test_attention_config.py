import dataclasses

import pytest

from brt import tasks
from brt.config import Attention, Config, CrossAttention, Encoder, Evaluation, Seq2Seq, Training
from brt.errors import ConfigError


@pytest.mark.parametrize(
    ("section", "settings", "message"),
    [
        (Attention, {"clusters": 0}, "Attention.clusters = 0 must be above 0"),
        (Attention, {"top_k": -1}, "Attention.top_k = -1 must be above 0"),
        (Attention, {"buckets": 7}, "Attention.buckets = 7 must be even"),
        (CrossAttention, {"segment_size": 0}, "CrossAttention.segment_size = 0 must be above 0"),
        (CrossAttention, {"without": ("segment",), "mix": "sigma"}, "nothing to mix; set Cross"),
        (
            CrossAttention,
            {"without": ("nom",)},
            r"\('nom',\) must consist of items",
        ),
        (Encoder, {"heads": 3}, "Model.model_dim = 512 must be a multiple of Model.heads = 3"),
        (Encoder, {"model_dim": 7, "heads": 7, "positions": "sinusoidal"}, "7 must be even where"),
        (Encoder, {"dropout": 1.0}, r"Model.dropout = 1.0 must be in \[0, 1\)"),
        (Encoder, {"attention_dropout": -2.0}, "or -1 for the value of Model.dropout"),
        (Encoder, {"features": 4, "token_types": 1}, "1 token types needs tokens"),
        (Encoder, {"layers": 0}, "Model.layers = 0 must be above 0"),
        (Seq2Seq, {"attention_dropout": 1.5}, "attention_dropout = 1.5 must be in"),
        (Seq2Seq, {"family": "bart", "encoder_attention": "transient_global"}, "family = 't5'"),
    ],
)
def test_settings_that_cannot_work_are_refused(section: type, settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        section(**settings)


MASKED = Training(task="masked_language_modeling", segment_length=64)


@pytest.mark.parametrize("read", [Evaluation(), Evaluation(segment_length=64)])
@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"kind": "clustered", "clusters": 65}, "clusters"),
        ({"kind": "improved_clustered", "clusters": 65}, "clusters"),
        ({"kind": "improved_clustered", "clusters": 9, "top_k": 65}, "top_k"),
        ({"kind": "oracle_top_k", "top_k": 65}, "top_k"),
    ],
)
def test_numbers_that_no_sequence_reaches_are_refused(
    read: Evaluation, settings: dict, name: str
) -> None:
    """The limit is the segment length of training or evaluation. Operations handle shorter rows."""
    section = "Evaluation" if read.segment_length else "Training"
    training = dataclasses.replace(MASKED, segment_length=128) if read.segment_length else MASKED
    with pytest.raises(
        ConfigError,
        match=f"Attention.{name} = 65 is above {section}.segment_length = 64, the most that a "
        "sequence has; set it to 64 at most",
    ):
        tasks.check(Config(training=training, evaluation=read, attention=Attention(**settings)))
    enough = {**settings, name: 64}
    tasks.check(Config(training=training, evaluation=read, attention=Attention(**enough)))


def test_numbers_that_nothing_reads_may_be_any() -> None:
    for settings in (
        {"kind": "clustered", "clusters": 9, "top_k": 65},
        {"kind": "full", "clusters": 65, "top_k": 65},
    ):
        tasks.check(Config(training=MASKED, attention=Attention(**settings)))
