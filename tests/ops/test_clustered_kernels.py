"""Compares clustered attention by the interpreted kernel of TPUs with the reference."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_label import KERNEL, V4, arrays, assert_close, by, run

from brt.config import Attention, Mesh
from brt.distributed.mesh import build
from brt.layers.attention_kinds import clustered_config
from brt.ops import dispatch
from brt.ops.clustered_attention import ClusteredConfig, attend_by_label, pallas
from brt.ops.dropout import Dropout

IMPROVED = {"kind": "improved_clustered", "top_k": 6}


def config(clusters: int = 20, **changes: Any) -> ClusteredConfig:
    return clustered_config(Attention(**{"kind": "clustered", **changes}, clusters=clusters))


@pytest.mark.parametrize(
    ("tokens", "keys", "clusters", "changes"),
    [
        (140, 300, 20, {}),
        (140, 300, 20, IMPROVED),
        pytest.param(300, 128, 130, {}, marks=pytest.mark.slow),
        pytest.param(300, 128, 130, IMPROVED, marks=pytest.mark.slow),
        pytest.param(40, 60, 5, IMPROVED | {"mass_rule": "paper_constant"}, marks=pytest.mark.slow),
        pytest.param(40, 5, 5, IMPROVED, marks=pytest.mark.slow),  # All keys are best keys.
    ],
)
def test_attention_and_gradients_are_those_of_the_reference(
    tokens: int, keys: int, clusters: int, changes: dict[str, Any]
) -> None:
    given, settings = arrays(tokens, keys, clusters), config(clusters, **changes)
    expected, found = (run(given, settings, by(name)) for name in ("reference", KERNEL))
    assert_close(found, expected)
    padding = np.moveaxis(np.asarray(given[2]) == clusters, 1, 2)
    assert not np.any(np.asarray(found[1])[padding]) and not np.any(found[1][-1])


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, IMPROVED], ids=["clustered", "improved"])
def test_the_kernel_in_bfloat16_is_close_to_xla(changes: dict[str, Any]) -> None:
    given, settings = arrays(140, 300, 20, "bfloat16"), config(**changes)
    assert_close(*(run(given, settings, by(name)) for name in (KERNEL, "xla")), "bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [Mesh(data=2, tensor=2), Mesh(fsdp=4)], ids=str)
def test_devices_that_share_lanes_and_heads_equal_one(mesh: Mesh) -> None:
    given, settings = arrays(24, 24, 5, lanes=4), config(5, **IMPROVED)
    expected = run(given, settings, by("xla"))
    with jax.set_mesh(build(mesh, {})):
        assert_close(run(given, settings, by(KERNEL)), expected)


@pytest.mark.parametrize(
    ("backend", "changed", "reason"),
    [
        ("tpu", {"width": 32}, "has heads of 64, 128 or 256, not of 32"),
        ("tpu", {"dtype": "float16"}, "computes in float32 and bfloat16, not in float16"),
        *((backend, *case) for backend in ("gpu", "tpu") for case in (
            ({"values": 64}, "has keys and values of one size, not of 128 and 64"),
            ({"mass_rule": "lse_jensen"}, "does not have Attention.mass_rule = 'lse_jensen'"),
            ({"dropout": Dropout(None, 0.1)}, "has no dropout; set its rate to 0"),
            ({"bias": jnp.zeros((1, 255))}, "has no bias of distances"),
        )),
    ],
)  # fmt: skip
def test_what_attention_does_not_support_is_said(
    backend: str, changed: dict[str, Any], reason: str
) -> None:
    given = {"width": 128, "dtype": "bfloat16", "mass_rule": "paper"} | changed
    x = jnp.zeros((1, 1, 128, given["width"]), given["dtype"])
    values = x[..., : given.get("values", given["width"])]
    settings = config(kind="improved_clustered", mass_rule=given["mass_rule"])
    others = given.get("dropout"), given.get("bias")
    with dispatch.use_backend(backend, V4 if backend == "tpu" else None):
        assert pallas.refusal(backend, x, x, values, None, None, settings, *others) == reason


@pytest.mark.parametrize("kind", ["clustered", "improved_clustered"])
def test_tpus_take_the_kernel_where_it_can_run_and_cpus_refuse_it(kind: str) -> None:
    def traced(width: int, backend: str = "tpu", name: str = "auto") -> str:
        x, labels = jnp.zeros((1, 16, 2, width)), jnp.zeros((1, 2, 16), jnp.int32)
        attend = partial(
            attend_by_label, x, x, x, jnp.ones((1, 16), bool), labels, config(kind=kind),
            scale=1.0, implementation=name,
        )  # fmt: skip
        with dispatch.use_backend(backend):
            return str(jax.make_jaxpr(attend)())

    assert "pallas_call" in traced(64) and "pallas_call" not in traced(32)
    for backend in ("tpu", "gpu"):
        with pytest.raises(NotImplementedError, match=f"runs on {backend}, not on cpu"):
            traced(64, backend="cpu", name=f"pallas_{backend}")
