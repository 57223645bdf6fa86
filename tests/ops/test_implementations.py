"""Compares every implementation of every op with its reference: outputs and gradients."""

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import cases
import jax
import jax.numpy as jnp
import pytest
from cases import KERNEL, Case, assert_close, both_passes

import brt.memories
import brt.ops
from brt.config import Mesh
from brt.config.training import OPERATIONS
from brt.distributed.mesh import build
from brt.ops.dispatch import Op

# Relative to the largest magnitude of an array; the terms of a scale's gradient cancel.
TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2}
# Every kind of gate and layout, some with options.
CELLS: dict[tuple[str, str], dict[str, Any]] = {
    ("fixed", "dual"): {},
    ("fixed", "single"): {},
    ("fixed", "skip"): {"null_keys": True, "normalize_qk": False},
    ("lstm", "dual"): {},
    ("lstm", "single"): {"null_keys": True},
    ("lstm", "skip"): {},
    ("gru", "dual"): {"normalize_qk": False},
    ("gru", "single"): {"unroll": 3},
    ("gru", "skip"): {},
}
CASES: dict[tuple[str, str], Callable[[], Case]] = {
    ("window_attention", "null keys"): partial(
        cases.window, null_keys=True, attend_to_self=False
    ),
    ("window_attention", "masked"): cases.window,
    ("window_attention", "past"): partial(cases.window, 64, lanes=2, attend_to_self=False),
    ("window_attention", "no bias"): partial(cases.window, 64, biased=False),
    ("window_attention", "groups"): partial(cases.window, 64, 2, 6, 2, scaled=True),
    ("window_attention", "documents in a block"): cases.local_window,
    **{
        ("recurrent_attention", " ".join(cell)): partial(cases.recurrent, *cell, **options)
        for cell, options in CELLS.items()
    },
    ("softmax_attention", "all keys"): partial(cases.softmax, None),
    ("softmax_attention", "null keys"): partial(cases.softmax, True),
    ("softmax_attention", "masked"): partial(cases.softmax, False),
    ("softmax_attention", "blocks"): cases.blocks_of_states,
    ("memory_attention", "exact"): partial(cases.memory, "exact"),
    ("memory_attention", "bucketed"): partial(cases.memory, "bucketed"),
    ("causal_clustered_attention", "self"): partial(cases.causal_clustered, True),
    ("causal_clustered_attention", "past"): partial(cases.causal_clustered, False),
    ("routed_attention", ""): cases.routed,
    ("masked_attention", "bias"): partial(cases.masked, True),
    ("masked_attention", "no bias"): partial(cases.masked, False),
    ("encoder_attention", "local"): partial(cases.local, False),
    ("encoder_attention", "wide"): partial(cases.local, False, radius=30),
    ("encoder_attention", "globals"): partial(cases.local, True),
    ("cross_attention", "full"): partial(cases.cross, kind="full"),
    ("cross_attention", "segmented"): partial(cases.cross, kind="segmented"),
    ("cross_attention", "srformer"): partial(cases.cross, kind="srformer"),
    ("cross_attention", "stride"): partial(
        cases.cross, kind="srformer", as_authors=True
    ),
    ("cross_attention", "rnn memory"): partial(cases.cross, kind="xl_memory"),
    ("cross_attention", "memory"): partial(cases.cross, kind="transformer_xl"),
    ("cross_attention", "means"): partial(cases.cross, kind="local_global"),
    ("clustered_attention", "clustered"): partial(cases.clustered, "clustered"),
    ("clustered_attention", "improved"): partial(cases.clustered, "improved_clustered"),
    ("clustered_attention", "constant mass"): partial(
        cases.clustered, "improved_clustered", mass_rule="paper_constant"
    ),
    # More centroids and keys than a tile of the kernel has.
    ("clustered_attention", "tiles"): partial(
        cases.clustered, "improved_clustered", 300, 140, 130
    ),
    ("kmeans", ""): cases.kmeans,
    ("kmeans", "tiles"): partial(cases.kmeans, 700, 63, 130),
    ("kmeans", "ties"): partial(cases.kmeans, 40, 8, 6),
    ("cross_entropy", ""): partial(cases.loss, 0.0),
    ("cross_entropy", "smoothed"): partial(cases.loss, 0.1),
    ("token_scores", ""): cases.scores,
    ("adafactor", ""): cases.optimizer,
}  # fmt: skip
# The kernels refuse these cases.
REFUSED = [
    *((("cross_attention", name), KERNEL) for name in ("rnn memory", "memory", "means")),
]


def all_ops() -> dict[str, Op]:
    """Returns all ops that modules of brt.ops and brt.memories declare, by name."""
    found = {}
    modules = (
        *pkgutil.walk_packages(brt.ops.__path__, "brt.ops."),
        *pkgutil.walk_packages(brt.memories.__path__, "brt.memories."),
    )
    for module in modules:
        values = vars(importlib.import_module(module.name)).values()
        found |= {op.name: op for op in values if isinstance(op, Op)}
    return found


OPS = all_ops()
WITHOUT_REFERENCE = {"dropout"}  # The implementations of dropout draw different random numbers.
# These ops have one implementation under both names; tests/ops/test_attention_baselines.py compares
# it with the definition.
PLAIN = {"oracle_top_k", "reformer"}


def implementations(case: tuple[str, str]) -> list[str]:
    """Returns the names of those that can run on CPUs, except the reference."""
    named = (one.name for one in OPS[case[0]].implementations if "cpu" in one.backends)
    return [name for name in named if name != "reference" and (case, name) not in REFUSED]


@cache
def results(case: tuple[str, str], name: str) -> tuple[Any, Any]:
    run, arrays, _ = CASES[case]()
    return both_passes(lambda arrays: run(name, *arrays), arrays)


@pytest.mark.slow_cases(
    "*-pallas*",
    "*'masked'*",
    "*'past'*",
    "*recurrent_attention', 'gru*",
    "*recurrent_attention', 'lstm*",
    "*recurrent_attention', 'fixed [ds][ui]*",
    "*causal_clustered_attention*",
    "('clustered_attention', *",
    "('masked_attention', *",
    "('window_attention', 'null keys')*",
    "('softmax_attention', 'null keys')*",
    "('softmax_attention', 'blocks')*",
    "('encoder_attention', 'wide')*",
    "('kmeans', '')*",
    "('cross_entropy', '')*",
    "*'tiles'*",
    "('cross_attention', *",
    "*'local'*",
    "*'no bias'*",
    "*'bucketed'*",
    "*'groups'*",
    "*'fixed skip'*",
)
@pytest.mark.parametrize(
    ("case", "name"), [(case, name) for case in CASES for name in implementations(case)], ids=str
)
def test_every_implementation_equals_the_reference(case: tuple[str, str], name: str) -> None:
    assert_close(results(case, name), results(case, "reference"), TOLERANCE["float32"])


# Every collection would take seconds if the cases were built in order to ask for their halves.
HALVES = [
    case for case in CASES
    if case[0] in ("window_attention", "softmax_attention", "masked_attention")
    or case == ("clustered_attention", "clustered")
]  # fmt: skip


@pytest.mark.slow_cases(
    "*-pallas*", "*'masked'*", "*'past'*", "*'no bias'*", "*'null keys'*", "*'groups'*",
    "*'clustered'*", "*'blocks'*", "*'bias'*", "*'documents*",
)  # fmt: skip
@pytest.mark.parametrize(
    ("case", "name"), [(case, name) for case in HALVES for name in implementations(case)], ids=str
)
def test_bfloat16_is_close_to_the_reference_in_float32(case: tuple[str, str], name: str) -> None:
    run, arrays, halves = CASES[case]()
    narrow = [x.astype(jnp.bfloat16) if i in halves else x for i, x in enumerate(arrays)]
    wide = [x.astype(jnp.float32) if i in halves else x for i, x in enumerate(narrow)]
    y, gradients = both_passes(lambda arrays: run(name, *arrays), narrow)
    assert jax.tree.leaves(y)[0].dtype == gradients[0].dtype == jnp.bfloat16
    expected = both_passes(lambda arrays: run("reference", *arrays), wide)
    assert_close((y, gradients), expected, TOLERANCE["bfloat16"])


DEVICES: list[tuple[Mesh, Callable[[], Case]]] = [
    (Mesh(data=2, tensor=2, sequence=2), partial(cases.window, 8, 4, 2, 2, null_keys=True)),
    (Mesh(fsdp=4, sequence=2), partial(cases.window, 8, 4, 2, 2, scaled=True)),
    (Mesh(data=3, tensor=2), partial(cases.local_window, 16, 4, 3, 4)),
    # Four devices share two heads of keys, so that every device has both heads.
    (Mesh(data=1, tensor=4), partial(cases.local_window, 16, 4, 2, 4)),
    (Mesh(data=2, tensor=2), partial(cases.masked, True)),
    (Mesh(fsdp=2), partial(cases.masked, False)),
    (Mesh(data=2, tensor=2, sequence=2), partial(cases.softmax, None)),
    (Mesh(data=2, tensor=2), partial(cases.softmax, False)),
    (Mesh(data=2, tensor=2, sequence=2), partial(cases.recurrent, "fixed", "skip", 4)),
    (Mesh(fsdp=4, tensor=2), partial(cases.recurrent, "fixed", "dual", 4)),
    (Mesh(data=2, tensor=2), partial(cases.causal_clustered, True, scans=False)),
    (Mesh(fsdp=2), partial(cases.causal_clustered, True, scans=False)),
    (Mesh(data=2, tensor=2), partial(cases.clustered, "improved_clustered")),
    (Mesh(fsdp=4), partial(cases.clustered, "improved_clustered", lanes=4)),
    (Mesh(data=4), partial(cases.loss, 0.1, 4)),
    (Mesh(data=2, fsdp=2), partial(cases.loss, 0.1, 4)),
    (Mesh(data=2, tensor=2), partial(cases.cross, kind="srformer", segment_size=8)),
    (Mesh(fsdp=4), partial(cases.cross, 4, kind="srformer", segment_size=8)),
]  # fmt: skip


@pytest.mark.slow_cases("mesh[1-4689]-*", "mesh1[0-9]-*", "mesh0-*")
@pytest.mark.parametrize(("mesh", "build_case"), DEVICES)
def test_devices_that_share_arrays_equal_one(mesh: Mesh, build_case: Callable[[], Case]) -> None:
    run, arrays, _ = build_case()
    expected = both_passes(lambda arrays: run("xla", *arrays), arrays)
    with jax.set_mesh(build(mesh, {})):
        found = both_passes(lambda arrays: run(KERNEL, *arrays), arrays)
        assert_close(found, expected, TOLERANCE["float32"])


def test_every_op_has_a_reference_a_case_and_a_choice_for_every_backend() -> None:
    assert {case[0] for case in CASES} == set(OPS) - WITHOUT_REFERENCE - PLAIN
    for name, op in OPS.items():
        names = [one.name for one in op.implementations]
        assert len(set(names)) == len(names)
        assert "reference" in names or name in WITHOUT_REFERENCE
        assert (len({one.function for one in op.implementations}) == 1) == (name in PLAIN)
        for backend in ("cpu", "gpu", "tpu"):
            assert any(backend in one.auto for one in op.implementations), (name, backend)


def test_a_gin_file_can_name_every_op() -> None:
    # Any module of brt draws dropout.
    assert set(OPERATIONS) == set(OPS) - {"dropout"}
