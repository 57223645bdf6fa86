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

PRESET = Path(__file__).resolve().parent.parent / "configs/cross_attention/paper.gin"


def test_the_preset_has_the_arithmetic_of_the_authors() -> None:
    bindings = ["Training.task = 'summarization'"]
    found = command_line.read([str(PRESET)], bindings).config.cross_attention
    assert found == CrossAttention(kind="srformer", as_authors=True)
    assert cross_config(found, "t5").clamp == 0 and cross_config(found, "bart").clamp == 2
    assert cross_config(CrossAttention(kind="srformer"), "bart").clamp == 0


def test_first_values_of_the_families() -> None:
    for family, leak, (low, high) in (
        ("t5", 0.1, (0.065, 0.08)),  # The standard deviation of U(-1/8, 1/8) is 0.072.
        ("bart", 0.5, (0.018, 0.022)),
    ):
        config = cross_config(CrossAttention(kind="srformer"), family)
        raf = cross_attention.initial_parameters(jax.random.key(0), config, 2, 64).raf
        assert raf.kernel.shape == (64, 64) and raf.sigma is None
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
        ({}, {"raf": ["kernel", "leak", "threshold"]}),
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


@pytest.mark.parametrize(
    ("changes", "source", "target", "sentence"),
    [
        (
            {}, 16384, 128,
            "a source of 16384 tokens has 256 segments, of which the decoder would read only "
            "128; set CrossAttention.segment_size = 128 or CrossAttention.q_ref = 256",
        ),
        (
            {"as_authors": True}, 1024, 142,
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
