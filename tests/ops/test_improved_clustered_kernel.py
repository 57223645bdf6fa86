"""Compares the TPU kernel of improved clustered attention, interpreted, with the reference."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_label import KERNEL, V4, arrays, assert_close, by, run
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from brt.config import Attention, Mesh
from brt.distributed.mesh import build
from brt.layers.attention_kinds import clustered_config
from brt.ops import dispatch
from brt.ops.clustered_attention import ClusteredConfig, attend_by_label, best_tpu, improved_tpu
from brt.ops.dropout import Dropout


def improved(clusters: int, top_k: int, **changes: Any) -> ClusteredConfig:
    return clustered_config(
        Attention(kind="improved_clustered", clusters=clusters, top_k=top_k, **changes)
    )


@pytest.mark.parametrize(
    ("tokens", "keys", "clusters", "top_k", "changes"),
    [
        (140, 300, 20, 6, {}),
        pytest.param(300, 40, 128, 32, {}, marks=pytest.mark.slow),
        pytest.param(40, 20, 5, 32, {}, marks=pytest.mark.slow),  # All keys are best keys.
        pytest.param(40, 60, 5, 7, {"mass_rule": "paper_constant"}, marks=pytest.mark.slow),
    ],
)
def test_attention_and_gradients_are_those_of_the_reference(
    tokens: int, keys: int, clusters: int, top_k: int, changes: dict[str, Any]
) -> None:
    given, config = arrays(tokens, keys, clusters), improved(clusters, top_k, **changes)
    expected, found = (run(given, config, by(name)) for name in ("reference", KERNEL))
    assert_close(found, expected)
    padding = np.moveaxis(np.asarray(given[2]) == clusters, 1, 2)
    assert not np.any(np.asarray(found[1])[padding]) and not np.any(found[1][-1])


@pytest.mark.slow
def test_the_kernel_in_bfloat16_is_close_to_xla() -> None:
    given, config = arrays(140, 300, 20, "bfloat16"), improved(20, 6)
    assert_close(*(run(given, config, by(name)) for name in (KERNEL, "xla")), "bfloat16")


@pytest.mark.slow  # The next test is a quick test of equal logits.
@pytest.mark.parametrize("tokens", [40, pytest.param(300, marks=pytest.mark.slow)])
def test_of_equal_keys_the_first_are_best(tokens: int) -> None:
    """Every key occurs three times, so that equal keys stand on both sides of the limit of the best
    keys. Their values differ.
    """
    (q, k, v), *others = arrays(tokens, tokens, 5)
    k = jnp.tile(k[:, : tokens // 3 + 1], (1, 3, 1, 1))[:, :tokens]
    given, config = ((q, k, v), *others), improved(5, 7)
    expected, found = (run(given, config, by(name)) for name in ("reference", KERNEL))
    assert_close(found, expected)
    # The output changes if the values are reversed.
    later = (q, k, v[:, ::-1]), *others
    assert np.abs(run(later, config, by(KERNEL))[1] - found[1]).max() > 0.1


@pytest.mark.parametrize("top_k", [1, 5, 32])
def test_lists_are_those_of_a_stable_sort(top_k: int) -> None:
    """Many logits are equal. The list of a vector lane whose cluster has no members may be
    longer.
    """
    keys, lanes = 512, 128
    drawn = np.random.default_rng(top_k).integers(0, 40, (keys, lanes)).astype(np.float32)
    counts = jnp.asarray(np.arange(lanes) % 9 > 0, jnp.float32)

    def kernel(logits: Any, counts: Any, values: Any, best: Any, lists: Any) -> None:
        def rows(step: Any) -> Any:
            return best_tpu.step_rows(logits, step)

        found = best_tpu.largest_values(keys // best_tpu.STEP_KEYS, rows, lists)
        values[...] = found
        ends = best_tpu.best_threshold(logits, found, counts[...], top_k)
        for step in range(keys // best_tpu.STEP_KEYS):
            places = best_tpu.step_places(step, lanes)
            chosen = best_tpu.is_best(rows(step), places, *ends)
            begin, end = step * best_tpu.STEP_KEYS, (step + 1) * best_tpu.STEP_KEYS
            best[begin:end] = jnp.where(chosen, 1, 0).reshape(best_tpu.STEP_KEYS, lanes)

    values, best = pl.pallas_call(
        kernel,
        out_shape=[
            jax.ShapeDtypeStruct((best_tpu.LIST_LENGTH, 8, lanes), "float32"),
            jax.ShapeDtypeStruct((keys, lanes), "int32"),
        ],
        scratch_shapes=[pltpu.VMEM((best_tpu.STEP_KEYS, lanes), jnp.float32)],
        interpret=True,
    )(drawn, jnp.broadcast_to(counts, (8, lanes)))
    order = np.argsort(-drawn, axis=0, kind="stable")
    largest = np.take_along_axis(drawn, order, axis=0)[: best_tpu.LIST_LENGTH]
    np.testing.assert_array_equal(values, np.repeat(largest[:, None], 8, axis=1))
    expected = np.zeros((keys, lanes), int)
    np.put_along_axis(expected, order[:top_k], 1, axis=0)
    members = np.asarray(counts) > 0
    np.testing.assert_array_equal(np.asarray(best)[:, members], expected[:, members])


@pytest.mark.slow  # test_recurrent_kernel.py has a quick test of unwritten memory and races.
def test_nothing_is_read_that_was_not_written_and_nothing_races(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The interpreter fills uninitialized memory with NaN and reports data races."""
    watched = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)

    def attend(
        q: Any, k: Any, v: Any, valid: Any, labels: Any, config: ClusteredConfig
    ) -> jax.Array:
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        y = improved_tpu.improved_clustered(
            q, k, v, valid, labels, config, None, None, interpret=watched
        )
        return y.swapaxes(1, 2)

    (q, k, v), valid, labels = arrays(24, 24, 5)
    there = (labels[:, 0] < 5)[..., None, None]
    given = (jnp.where(there, q, 0), *(jnp.where(valid[..., None, None], x, 0) for x in (k, v)))
    given, config = (given, valid, labels), improved(5, 2)
    assert_close(run(given, config, attend), run(given, config, partial(by("xla"), scale=1.0)))
    assert "RACE" not in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [Mesh(data=2, tensor=2), Mesh(fsdp=4)])
def test_devices_that_share_lanes_and_heads_equal_one(mesh: Mesh) -> None:
    given, config = arrays(24, 24, 5, lanes=4), improved(5, 3)
    expected = run(given, config, by("xla"))
    with jax.set_mesh(build(mesh, {})):
        assert_close(run(given, config, by(KERNEL)), expected)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"width": 32}, "has heads of 64 or 128, not of 32 and 32"),
        ({"clusters": 129}, "has 128 clusters and 32 best keys at most, not 129 and 32"),
        ({"top_k": 33}, "has 128 clusters and 32 best keys at most, not 4 and 33"),
        ({"mass_rule": "lse_jensen"}, "weighs best keys by the rule 'paper', not by 'lse_jensen'"),
        ({"dtype": "float16"}, "computes in float32 and bfloat16, not in float16"),
        ({"tokens": 1 << 17}, "keeps a head on the chip, 14 MiB of it at most, not"),
        # 64 + 128 numbers take 256 vector lanes.
        ({"tokens": 768, "wide": 128}, "14 MiB of it at most, not 15"),
        ({"dropout": Dropout(None, 0.1)}, "has no dropout; set its rate to 0"),
        ({"bias": jnp.zeros((1, 255))}, "has no bias of distances"),
    ],
)
def test_what_the_kernel_does_not_support_is_said(changed: dict[str, Any], reason: str) -> None:
    given = {"width": 64, "dtype": "bfloat16", "tokens": 128, "clusters": 4, "top_k": 32}
    given |= {"dropout": None, "bias": None, "mass_rule": "paper"} | changed
    wide = given.pop("wide", given["width"])
    width, dtype, tokens, clusters, top_k, dropout, bias, rule = given.values()
    x, values = (jnp.zeros((1, 1, tokens, size), dtype) for size in (width, wide))
    config = improved(clusters, top_k, mass_rule=rule)
    with dispatch.use_backend("tpu", V4):
        said = improved_tpu.refusal(x, x, values, None, None, config, dropout, bias)
    assert reason in str(said)


def test_tpus_take_the_kernel_where_it_can_run_and_cpus_refuse_it() -> None:
    def traced(width: int, backend: str = "tpu", name: str = "auto") -> str:
        x, labels = jnp.zeros((1, 16, 2, width)), jnp.zeros((1, 2, 16), jnp.int32)
        attend = partial(
            attend_by_label, x, x, x, jnp.ones((1, 16), bool), labels, improved(4, 3),
            scale=1.0, implementation=name,
        )  # fmt: skip
        with dispatch.use_backend(backend):
            return str(jax.make_jaxpr(attend)())

    assert "pallas_call" in traced(64) and "pallas_call" not in traced(32)
    with pytest.raises(NotImplementedError, match="runs on tpu, not on cpu"):
        traced(64, backend="cpu", name="pallas_tpu")
