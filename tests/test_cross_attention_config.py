"""Tests the settings of cross-attention: the presets, and settings that are refused."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from brt import command_line
from brt.config import CrossAttention
from brt.errors import ConfigError
from brt.layers.seq2seq import cross_config
from brt.ops import cross_attention

PRESETS = Path(__file__).resolve().parent.parent / "configs/cross_attention"
CHANGES = {
    "paper_t5": {
        "index_mode": "batch", "count_padding_in": ("segments", "sums"), "norm_epsilon": 0.0,
    },
    "paper_bart": {
        "index_mode": "batch", "count_padding_in": ("segments", "sums"), "norm_epsilon": 0.0,
        "clamp": 2.0, "leak_init": 0.5, "kernel_init": "normal",
    },
}  # fmt: skip


def preset(name: str) -> CrossAttention:
    task = "Training.task = 'summarization'"
    return command_line.read([f"{PRESETS / name}.gin"], [task]).config.cross_attention


def test_presets_change_only_the_listed_settings() -> None:
    assert {file.stem for file in PRESETS.iterdir()} == set(CHANGES)
    for name, changes in CHANGES.items():
        assert preset(name) == CrossAttention(kind="srformer", **changes)


def test_first_values_of_the_presets() -> None:
    for name, leak, (low, high) in (
        ("paper_t5", 0.1, (0.065, 0.08)),  # The standard deviation of U(-1/8, 1/8) is 0.072.
        ("paper_bart", 0.5, (0.018, 0.022)),
    ):
        raf = cross_attention.initial_parameters(
            jax.random.key(0), cross_config(preset(name)), 2, 64
        ).raf
        assert raf.kernel.shape == (64, 64) and raf.bias is None and raf.sigma is None
        assert low < np.std(raf.kernel) < high
        np.testing.assert_allclose((raf.leak, raf.threshold), (leak, 0.1), rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"kind": "full"}, {}),
        ({"kind": "segmented"}, {}),
        ({"kind": "local_global"}, {}),
        ({"kind": "transformer_xl"}, {}),
        ({"without": ("raf",)}, {}),
        ({"without": ("raf",), "mix": "sigma"}, {"raf": ["sigma"]}),
        ({"without": ("raf",), "mix": "gated"}, {"raf": ["gate"]}),
        ({"raf_bias": True}, {"raf": ["kernel", "leak", "threshold", "bias"]}),
        (
            {"kind": "xl_memory"},
            {part: ["input_kernel", "kernel", "bias"] for part in ("memory_keys", "memory_values")},
        ),
    ],
    ids=str,
)
def test_each_kind_learns_what_it_uses(changes: dict, names: dict) -> None:
    config = dataclasses.replace(CrossAttention(kind="srformer"), **changes)
    found = cross_attention.specifications(cross_config(config), heads=2, head_dim=4)
    assert {part: list(entries) for part, entries in found.items()} == names
    initial = cross_attention.initial_parameters(jax.random.key(0), cross_config(config), 2, 4)
    shapes = sorted(spec.shape for entries in found.values() for spec in entries.values())
    assert sorted(leaf.shape for leaf in jax.tree.leaves(initial)) == shapes
    assert all(len(s.axes) == len(s.shape) for part in found.values() for s in part.values())


def test_parameters_per_layer_of_the_paper() -> None:
    initial = cross_attention.initial_parameters(
        jax.random.key(0), cross_config(CrossAttention(kind="srformer")), 8, 64
    )
    assert sum(leaf.size for leaf in jax.tree.leaves(initial)) == 4098


def test_bounded_parameters_begin_where_raw_ones_do() -> None:
    from brt.ops.cross_attention.recurrence import leak_and_threshold

    config = CrossAttention(kind="srformer", raf_parameters="bounded", leak_init=0.3)
    raf = cross_attention.initial_parameters(jax.random.key(0), cross_config(config), 2, 4).raf
    np.testing.assert_allclose(leak_and_threshold(raf, cross_config(config)), (0.3, 0.1), rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "source", "target", "sentence"),
    [
        (
            {}, 16384, 128,
            "a source of 16384 tokens has 256 segments, of which the decoder would read only "
            "128; set CrossAttention.segment_size = 128 or CrossAttention.q_ref = 256",
        ),
        (
            {"index_mode": "stride"}, 1088, 128,
            "has 17 segments, of which the decoder would read only 16; set "
            "CrossAttention.segment_size = 68 or a smaller CrossAttention.stride",
        ),
        (
            {"index_mode": "batch"}, 1024, 142,
            "a target of 142 tokens is longer than CrossAttention.q_ref = 128, over which the "
            "segments are spread; set CrossAttention.q_ref = 142, or Pairs.max_target_length = 128",
        ),
    ],
)  # fmt: skip
def test_lengths_that_would_leave_something_unread(
    changes: dict, source: int, target: int, sentence: str
) -> None:
    config = CrossAttention(kind="srformer", **changes)
    with pytest.raises(ConfigError) as error:
        config.check_lengths(source, target)
    assert sentence in str(error.value)


def test_lengths_that_fit_are_accepted() -> None:
    config = CrossAttention(kind="srformer")
    config.check_lengths(8192, 128)
    dataclasses.replace(config, segment_size=128).check_lengths(16384, 128)
    dataclasses.replace(config, index_mode="stride").check_lengths(1024, 999)
    CrossAttention(kind="full").check_lengths(10**6, 10**6)


def test_settings_that_nothing_reads_are_refused() -> None:
    task = "Training.task = 'summarization'"
    forgotten = "Pairs.prefix has no effect if Training.task = 'language_modeling'; set"
    with pytest.raises(ConfigError, match=forgotten):
        command_line.read((), ["Pairs.prefix = 'summarize: '"])
    with pytest.raises(ConfigError, match="Model.layers has no effect if Training.task"):
        command_line.read((), [task, "Model.layers = 2"])
    # These are the defaults.
    command_line.read((), ["Pairs.max_target_length = 128", "Decoding.beams = 1"])
    command_line.read((), [task, "Data.cache_dir = 'cache'", "Decoding.beams = 4"])
