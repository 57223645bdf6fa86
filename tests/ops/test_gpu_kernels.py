"""Compares the GPU kernels of attention, interpreted, with the reference, and tests their use."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_choice import SIGN, traced

import brt.ops.attention
from brt.config import Attention, CrossAttention
from brt.layers.attention_kinds import clustered_config
from brt.layers.seq2seq import cross_config
from brt.ops import cross_attention, dispatch, softmax_attention
from brt.ops.attention import gpu
from brt.ops.attention.gpu_inputs import TILE
from brt.ops.causal_clustered_attention import CentroidMemory, Centroids
from brt.ops.causal_clustered_attention import pallas as causal_clustered_kernels
from brt.ops.causal_clustered_attention import reference as causal_clustered_reference
from brt.ops.causal_clustered_attention.centroid_memory import FarInputs
from brt.ops.clustered_attention import pallas as clustered_kernels
from brt.ops.clustered_attention import reference as clustered_reference
from brt.ops.clustered_attention.config import ClusterInputs
from brt.ops.cross_attention import reference as cross_reference
from brt.ops.cross_attention import xla as cross_xla
from brt.ops.cross_attention.dense import SegmentKernels
from brt.ops.cross_attention.parameters import CrossInputs
from brt.ops.dropout import Dropout, DropoutMask
from brt.ops.masked_attention import pallas as masked_kernels
from brt.ops.masked_attention import xla as masked_xla
from brt.ops.partial_attention import AttentionPart
from brt.ops.softmax_attention import pallas as softmax_kernels
from brt.ops.window_attention import document_places, local_attention, window_part
from brt.ops.window_attention import pallas_gpu as window_gpu
from brt.ops.window_attention.inputs import WindowInputs

# Relative to the largest magnitude of an array. The kernels take sums in another order.
TOLERANCE = {"float32": 5e-6, "bfloat16": 2e-2, "float16": 2e-3}
Arrays = dict[str, Any]
# A case has the arrays with gradients; a function of these arrays and of the option `interpret`,
# which calls the kernels; and the same by the reference.
Case = tuple[Arrays, Callable[..., Any], Callable[..., Any]]


def draw(dtype: str = "float32") -> Callable[..., jax.Array]:
    rng = np.random.default_rng(0)
    return lambda *shape: jnp.asarray(rng.normal(size=shape) / 2, dtype)


def blocks(
    window: int = 64, width: int = 32, dtype: str = "float32", *, bias: bool = True,
    dropout: bool = False, attend_to_self: bool = True,
) -> Case:  # fmt: skip
    """Windows of one block; the second block starts a document."""
    normal, heads = draw(dtype), 2
    tokens, cached = (1, 2 * window, heads, width), (1, window, heads, width)
    arrays = {
        "queries": normal(*tokens), "cached": (normal(*cached), normal(*cached)),
        "keys": normal(*tokens), "values": normal(*tokens),
        "bias": draw()(heads, window) if bias else None,
    }  # fmt: skip
    kept = np.random.default_rng(1).random((heads, window, window)) < 0.5
    given = {
        "cache_mask": jnp.asarray([[True, False]]),
        "dropout": DropoutMask(jnp.asarray(kept), scale=2.0) if dropout else None,
        "attend_to_self": attend_to_self,
        "scale": None,
    }

    def kernel(interpret: Any, cache_mask: Any, attend_to_self: bool, **given: Any) -> Any:
        first = document_places(cache_mask, window)
        options = {"attend_to_self": attend_to_self, "interpret": interpret}
        return window_gpu.window_attention(WindowInputs(first=first, **given), **options)

    reference = functools.partial(window_part, implementation="reference")
    return arrays, functools.partial(kernel, **given), functools.partial(reference, **given)


def windows() -> Case:
    """Windows of 40 tokens and two heads of queries for a head of keys.

    One document starts inside of the cache, and one at the place 32 of the segment.
    """
    normal = draw()
    tokens, cached = (1, 64, 1, 32), (1, 40, 1, 32)
    arrays = {
        "queries": normal(1, 64, 2, 32), "cached": (normal(*cached), normal(*cached)),
        "keys": normal(*tokens), "values": normal(*tokens), "bias": normal(2, 40),
        "scale": jnp.asarray([1.0, 2.0]),
    }  # fmt: skip
    given = {"first": jnp.asarray([[-32, 32]]), "attend_to_self": True}

    def kernel(interpret: Any, attend_to_self: bool, **given: Any) -> Any:
        options = {"attend_to_self": attend_to_self, "interpret": interpret}
        return window_gpu.window_attention(WindowInputs(**given), **options)

    reference = functools.partial(local_attention, implementation="reference")
    return arrays, functools.partial(kernel, **given), functools.partial(reference, **given)


def masked(queries: int = 64, *, biased: bool = True, dropout: bool = False) -> Case:
    """A mask for each query if `biased`, and else for each row. The last row sees nothing."""
    normal, lanes, heads, keys = draw(), 2, 2, 128
    arrays = {
        "queries": normal(lanes, queries, heads, 32),
        "keys": normal(lanes, keys, heads, 32),
        "values": normal(lanes, keys, heads, 32),
        "bias": normal(heads, queries, keys) if biased else None,
    }
    mask = np.random.default_rng(1).random((lanes, queries if biased else 1, keys)) < 0.7
    mask[-1] = False
    given = {
        "mask": jnp.asarray(mask), "dropout": Dropout(jax.random.key(0), 0.3) if dropout else None
    }  # fmt: skip

    return (
        arrays, functools.partial(masked_kernels.attend_part, backend="gpu", **given),
        functools.partial(masked_xla.attend_part, **given),
    )  # fmt: skip


def states(cache_mask: list[bool] | None) -> Case:
    normal = draw()
    axis = () if cache_mask else (2,)
    arrays = {
        "queries": normal(2, 64 if cache_mask else 128, 1, 32),
        "k": normal(2, *axis, 1, 128, 32), "v": normal(2, *axis, 1, 128, 32),
    }  # fmt: skip
    mask = None if cache_mask is None else jnp.asarray(cache_mask)
    given = {"cache_mask": mask, "scale": jnp.asarray([2.0])}

    def reference(queries: jax.Array, k: jax.Array, v: jax.Array, **given: Any) -> Any:
        run = functools.partial(dispatch.run, softmax_attention.api.OP, "reference")
        return run(queries, k, v, given.pop("cache_mask"), **given)

    return (
        arrays, functools.partial(softmax_kernels.by_spans, **given),
        functools.partial(reference, **given),
    )  # fmt: skip


def clustered(kind: str) -> Case:
    """The kernels take heads of a multiple of 32."""
    config = clustered_config(Attention(kind=kind, clusters=5, top_k=6))
    q, k, v = cases.normal(0, (2, 2, 20, 32), *[(2, 2, 30, 32)] * 2)
    labels = np.random.default_rng(0).integers(0, 4, (2, 2, 20))  # the last cluster is empty
    labels[:, :, ::7] = 5
    valid = jnp.arange(30)[None] < jnp.asarray([[27], [0]])

    def attend(function: Callable[..., Any], q: Any, k: Any, v: Any, **options: Any) -> Any:
        there = (labels < 5)[..., None]
        k, v = (jnp.where(valid[:, None, :, None], x, 0) for x in (k, v))
        inputs = ClusterInputs(
            jnp.where(there, q / 4, 0), k, v, valid, jnp.asarray(labels, jnp.int32)
        )
        return function(inputs, config, **options)

    kernel = functools.partial(clustered_kernels.attend, backend="gpu")
    return (
        {"q": q, "k": k, "v": v}, functools.partial(attend, kernel),
        functools.partial(attend, clustered_reference.attend),
    )  # fmt: skip


def causal_clustered() -> Case:
    """Two blocks; the first may not read the previous block, and its memory is not full."""
    normal, window, clusters = draw(), 64, 8
    tokens, memory = (1, 2 * window, 1, 32), (2, 1, 1, clusters)
    arrays = {
        "queries": normal(*tokens), "window": AttentionPart(normal(*tokens), normal(*tokens[:3])),
        "keys": normal(1, 3 * window, 1, 32), "values": normal(1, 3 * window, 1, 32),
        "memory": [
            normal(*memory, 8, 32), normal(*memory, 8, 32), normal(*memory, 32), normal(*memory)
        ],
        "bias": normal(1),
    }  # fmt: skip
    centroids = Centroids(normal(1, clusters, 32), normal(1, clusters) ** 2)

    def attend(function: Callable[..., Any], memory: Any, bias: Any, **given: Any) -> jax.Array:
        options = {name: given.pop(name) for name in ("interpret",) if name in given}
        pasts = CentroidMemory(*memory, jnp.asarray([[5], [8]]))
        cache_mask = jnp.asarray([[False, True]])
        inputs = FarInputs(
            **given, cache_mask=cache_mask, pasts=pasts, centroids=centroids, bias=bias
        )
        return function(inputs, attend_to_self=True, **options)

    kernel = functools.partial(causal_clustered_kernels.attend, backend="gpu")
    return (
        arrays, functools.partial(attend, kernel),
        functools.partial(attend, causal_clustered_reference.attend),
    )  # fmt: skip


CASES: dict[str, Callable[[], Case]] = {
    "blocks": lambda: blocks(attend_to_self=False, dropout=True),
    "blocks without bias": lambda: blocks(bias=False),
    "blocks of wide heads": lambda: blocks(width=256, dtype="bfloat16"),
    "blocks in float16": lambda: blocks(128, 64, dtype="float16"),
    "windows": windows,
    "masked": masked,
    "masked with dropout": lambda: masked(dropout=True),
    "masked keys": lambda: masked(biased=False),
    "states": lambda: states([True, False]),
    "states of blocks": lambda: states(None),
    "clustered": lambda: clustered("clustered"),
    "improved clustered": lambda: clustered("improved_clustered"),
    "causal clustered": causal_clustered,
}
QUICK = "windows", "states"


def computed(function: Callable[..., Any], arrays: Arrays, **options: Any) -> list[np.ndarray]:
    """Returns the results, and the gradients of their sum with random weights, of two equal
    runs.
    """

    def loss(arrays: Arrays) -> tuple[jax.Array, Any]:
        results, rng = function(**arrays, **options), np.random.default_rng(2)
        leaves = [x.astype(jnp.float32) for x in jax.tree.leaves(results)]
        return sum(jnp.sum(x * rng.normal(size=x.shape)) for x in leaves), results

    learned = {name: x for name, x in arrays.items() if x is not None}
    absent = {name: None for name in arrays if name not in learned}
    step = jax.jit(jax.grad(lambda given: loss(given | absent), has_aux=True))
    found = jax.tree.leaves(step(learned))
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(step(learned)), found)
    return [np.asarray(x, np.float64) for x in found]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES],
)
@pytest.mark.slow_cases("states")
def test_kernels_equal_the_reference_and_each_run_gives_the_same_bits(
    name: str, mosaic_gpu_interpreter: Any
) -> None:
    """Uninitialized memory is NaN. The interpreter reports barriers that a kernel arrives at too
    often or does not wait for.
    """
    arrays, kernel, reference = CASES[name]()
    dtype = next(iter(arrays.values())).dtype.name
    found = computed(kernel, arrays, interpret=mosaic_gpu_interpreter)
    with dispatch.use_backend("gpu"):  # Dropout draws other numbers on CPUs.
        expected = computed(reference, arrays)
    for a, e in zip(found, expected, strict=True):
        assert np.abs(a - e).max() <= TOLERANCE[dtype] * np.abs(e).max()


def test_segmented_attention_by_a_kernel_for_softmax_equals_the_reference() -> None:
    """On CPUs, plain XLA computes the masked attention."""
    config = cross_config(CrossAttention(kind="srformer", segment_size=32, q_ref=64))
    parameters = cross_attention.initial_parameters(jax.random.key(0), config, 2, 8)
    arrays = dict(
        zip(("queries", "keys", "values"), cases.normal(0, *[(2, 64, 2, 8)] * 3), strict=True)
    )
    valid = jnp.arange(64)[None] < jnp.asarray([[64], [32]])
    kernels = SegmentKernels(unit=TILE)

    def by(function: Callable[..., Any], **options: Any) -> list[np.ndarray]:
        def attend(**qkv: jax.Array) -> Any:
            return function(
                CrossInputs(**qkv, valid=valid, parameters=parameters),
                config,
                t0=0,
                target_length=None,
                dropout=None,
                **options,
            )

        return computed(attend, arrays)

    found, expected = by(cross_xla.attend, kernels=kernels), by(cross_reference.attend)
    for a, e in zip(found, expected, strict=True):
        assert np.abs(a - e).max() <= TOLERANCE["float32"] * np.abs(e).max()


@pytest.mark.parametrize("name", ["Barrier", "CompilerParams.reduction_scratch_bytes"])
def test_a_jax_without_a_name_that_kernels_import_has_no_kernels(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mosaic_gpu = pytest.importorskip("jax.experimental.pallas.mosaic_gpu")
    for module in ("gpu_kernels", "gpu_tiles"):
        monkeypatch.delitem(sys.modules, f"{brt.ops.attention.__name__}.{module}", raising=False)
        monkeypatch.delattr(brt.ops.attention, module, raising=False)
    *inside, last = name.split(".")
    monkeypatch.delattr(functools.reduce(getattr, inside, mosaic_gpu), last, raising=False)
    monkeypatch.setattr(gpu, "_modules", gpu._modules.__wrapped__)
    refused = gpu.refusal(jnp.zeros((1, 64, 1, 64), "bfloat16"), 64, 64)
    assert refused.startswith("needs Pallas' Mosaic GPU backend of jax 0.10, and here: ")
    assert last in refused and SIGN["gpu"] not in traced("window", "gpu")


@pytest.mark.parametrize(
    "error",
    [TypeError("of a tile"), AttributeError("of a tile"), ImportError("of a tile", name="brt.ops")],
)
def test_a_mistake_of_the_kernels_is_no_reason_to_do_without(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise error

    monkeypatch.setattr(gpu, "_modules", broken)
    with pytest.raises(type(error), match="of a tile"):
        traced("window", "gpu")
