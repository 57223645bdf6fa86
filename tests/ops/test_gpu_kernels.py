"""Compares the GPU kernels of attention, interpreted, with the reference, and tests their use."""

import dataclasses
import functools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import by_label
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import brt.ops.attention
from brt.config import Attention, CrossAttention
from brt.layers.attention_kinds import clustered_config
from brt.layers.seq2seq import cross_config
from brt.ops import clustered_attention, dispatch, masked_attention, softmax_attention
from brt.ops import segmented_recurrent_attention as segmented
from brt.ops.attention import gpu
from brt.ops.attention.gpu_inputs import TILE
from brt.ops.causal_clustered_attention import (
    CentroidMemory,
    Centroids,
    causal_clustered_attention,
)
from brt.ops.causal_clustered_attention import pallas as causal_clustered_kernels
from brt.ops.clustered_attention import pallas as clustered_kernels
from brt.ops.dropout import Dropout, DropoutMask
from brt.ops.masked_attention import pallas_gpu as masked_gpu
from brt.ops.masked_attention import xla as masked_xla
from brt.ops.partial_attention import AttentionPart
from brt.ops.segmented_recurrent_attention import xla as segmented_xla
from brt.ops.segmented_recurrent_attention.dense import DenseKernels, read_states
from brt.ops.softmax_attention import pallas_gpu as softmax_gpu
from brt.ops.window_attention import (
    document_places,
    local_attention,
    window_part,
    with_joined_keys,
)
from brt.ops.window_attention import pallas_gpu as window_gpu

# Relative to the largest magnitude of an array. The kernels take sums in another order.
TOLERANCE = {"float32": 5e-6, "bfloat16": 2e-2, "float16": 2e-3}
IS_KERNEL = "copy_gmem_to_smem"  # The jaxpr of a kernel has this operation.
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
    kernel = with_joined_keys(window_gpu.window_attention)

    def by_block(cache_mask: jax.Array, **given: Any) -> Any:
        first = document_places(cache_mask, given["cached"][0].shape[1])
        return kernel(first=first, **given)

    reference = functools.partial(window_part, implementation="reference")
    return arrays, functools.partial(by_block, **given), functools.partial(reference, **given)


def windows() -> Case:
    """Windows of 100 tokens and two heads of queries for a head of keys.

    Documents start at the place 32 of the segment, and inside of the cache.
    """
    normal = draw()
    tokens, cached = (2, 64, 1, 32), (2, 100, 1, 32)
    arrays = {
        "queries": normal(2, 64, 2, 32), "cached": (normal(*cached), normal(*cached)),
        "keys": normal(*tokens), "values": normal(*tokens), "bias": normal(2, 100),
    }  # fmt: skip
    given = {
        "first": jnp.asarray([[-200, 32], [-32, -32]]), "attend_to_self": True,
        "scale": jnp.asarray([1.0, 2.0]),
    }  # fmt: skip
    kernel = with_joined_keys(window_gpu.window_attention)
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
        arrays, functools.partial(masked_gpu.attend_part, **given),
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
        arrays, functools.partial(softmax_gpu.attention, **given),
        functools.partial(reference, **given),
    )  # fmt: skip


def clustered(kind: str) -> Case:
    narrow, valid, labels = by_label.arrays(20, 30, 5)
    q, k, v = (jnp.tile(x, 4) / 2 for x in narrow)  # the kernels take heads of a multiple of 32
    config = clustered_config(Attention(kind=kind, clusters=5, top_k=6))

    def kernel(q: jax.Array, k: jax.Array, v: jax.Array, interpret: Any) -> jax.Array:
        scaled = jnp.where((labels[:, 0] < 5)[..., None, None], 0.5 * q, 0)
        hidden = (jnp.where(valid[..., None, None], x, 0) for x in (k, v))
        by_head = (x.swapaxes(1, 2) for x in (scaled, *hidden))
        y = clustered_kernels.attend_by_head(
            kind, "gpu", *by_head, valid, labels, config, None, None, interpret=interpret
        )
        return y.swapaxes(1, 2)

    def reference(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return by_label.by("reference")(q, k, v, valid, labels, config)

    return {"q": q, "k": k, "v": v}, kernel, reference


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

    def attend(function: Callable[..., Any], **inputs: Any) -> jax.Array:
        pasts = CentroidMemory(*inputs.pop("memory"), jnp.asarray([[5], [8]]))
        cache_mask = jnp.asarray([[False, True]])
        return function(
            **inputs, cache_mask=cache_mask, pasts=pasts, centroids=centroids, attend_to_self=True
        )

    # The function that each device runs takes its arrays by position.
    def by_position(**given: Any) -> jax.Array:
        names = "queries", "window", "keys", "values", "cache_mask", "pasts", "centroids", "bias"
        by_name = [given.pop(name) for name in names]
        return causal_clustered_kernels.causal_clustered_attention(*by_name, backend="gpu", **given)

    kernel = functools.partial(attend, by_position)
    reference = functools.partial(causal_clustered_attention, implementation="reference")
    return arrays, kernel, functools.partial(attend, reference)


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
QUICK = "blocks", "windows", "masked with dropout", "states"


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


CROSS = cross_config(CrossAttention(kind="srformer", segment_size=32))


def cross(queries: jax.Array, keys: jax.Array, config: Any = CROSS, **options: Any) -> jax.Array:
    """Returns SRformer's attention to sources of one and of two segments; keys are values, too."""
    attend = segmented_xla.attend if "kernels" in options else segmented.attend
    counts, width = jnp.asarray([1, 2]), queries.shape[-1]
    mask = jnp.arange(2)[:, None, None] < counts[None, :, None]
    windows = segmented.SegmentWindows(
        keys, keys, jnp.broadcast_to(mask, (2, 2, keys.shape[3])), counts
    )
    learned = segmented.RecurrenceParameters(
        jnp.eye(width), jnp.float32(0.7), jnp.float32(4.0), jnp.zeros(width)
    )
    return attend(queries, windows, learned, config, **options)[0]


def test_segmented_attention_by_a_kernel_for_softmax_equals_the_reference() -> None:
    """On CPUs, plain XLA computes the masked attention."""
    normal = draw()
    arrays = {"queries": normal(2, 64, 2, 8), "keys": normal(2, 2, 2, 32, 8)}
    by_kernels = functools.partial(cross, kernels=DenseKernels(read_states, TILE))
    reference = functools.partial(cross, implementation="reference")
    for a, e in zip(computed(by_kernels, arrays), computed(reference, arrays), strict=True):
        assert np.abs(a - e).max() <= TOLERANCE["float32"] * np.abs(e).max()


def used(
    kind: str, *, tokens: int = 64, width: int = 64, dtype: str = "bfloat16",
    implementation: str | None = None,
) -> str:  # fmt: skip
    """Returns the jaxpr of the gradients of a kind of attention on a GPU."""
    x, option = jnp.zeros((2, tokens, 2, width), dtype), {"implementation": implementation}
    labels, flags = jnp.zeros((2, 2, tokens), jnp.int32), jnp.ones((2, tokens), bool)
    config = clustered_config(Attention(kind="improved_clustered", clusters=5, top_k=6))
    memory = jnp.zeros((1, 2, 2, 8, 8, width), dtype)
    past = CentroidMemory(
        memory, memory, *(memory[:, :, :, :, 0].astype("float32"), jnp.zeros(memory.shape[:4])),
        jnp.full((1, 2), 8),
    )  # fmt: skip
    centroids = Centroids(jnp.zeros((2, 8, width)), jnp.zeros((2, 8)))
    part = AttentionPart(x, jnp.zeros(x.shape[:3]))
    functions: dict[str, Callable[[jax.Array], Any]] = {
        "window": lambda x: window_part(x, (x, x), x, x, None, flags[:, :1], **option),
        "local": lambda x: local_attention(
            x, (x, x), x, x, None, jnp.zeros((2, 2), jnp.int32), **option
        ),
        "states": lambda x: softmax_attention.attend_to_blocks(
            x, *[jnp.concatenate([x, x], axis=1).swapaxes(1, 2)] * 2, flags[:, 0],
            null_keys=False, **option,
        ),
        "masked": lambda x: masked_attention.attend(x, x, x, None, flags[:, None], **option),
        "segmented": lambda x: cross(
            x, x.reshape(2, 2, -1, 2, width).transpose(1, 0, 3, 2, 4), **option
        ),
        "clustered": lambda x: clustered_attention.attend_by_label(
            x, x, x, flags, labels, config, scale=1.0, **option
        ),
        "causal clustered": lambda x: causal_clustered_attention(
            x, part, *[jnp.concatenate([x, x], axis=1)] * 2, flags[:, :1], past, centroids,
            jnp.zeros(2), **option,
        ),
    }  # fmt: skip

    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(jax.tree.leaves(functions[kind](x))[0].astype(jnp.float32)))

    with dispatch.use_backend("gpu"):
        return str(jax.make_jaxpr(jax.grad(loss))(x))


KINDS = "window", "local", "states", "masked", "segmented", "clustered", "causal clustered"


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_attention_trains_by_the_kernels(kind: str) -> None:
    assert used(kind).count("attention_keys") and IS_KERNEL in used(kind)
    assert IS_KERNEL not in used(kind, dtype="float32")


@pytest.mark.parametrize(
    ("kind", "changed", "reason"),
    [
        ("window", {"tokens": 48}, "takes a multiple of 64 queries and of 64 keys, not 48 and 48"),
        ("local", {"width": 48}, "has heads of 64, 128 or 256, not of 48"),
        ("states", {"dtype": "float32"}, "computes in bfloat16 and float16, not in float32"),
        ("masked", {"tokens": 96}, "takes a multiple of 64 queries and of 64 keys, not 96 and 96"),
        ("segmented", {"tokens": 96}, "takes a multiple of 64 queries .*, not 96 and 96"),
        ("clustered", {"width": 32}, "has heads of 64, 128 or 256, not of 32"),
        ("causal clustered", {"tokens": 32}, "takes a multiple of 64 queries .*, not 32 and 64"),
    ],
)
def test_what_the_kernels_do_not_support_is_said(
    kind: str, changed: dict[str, Any], reason: str
) -> None:
    with pytest.raises(NotImplementedError, match=reason):
        used(kind, **changed, implementation="pallas_gpu")
    assert IS_KERNEL not in used(kind, **changed)


def test_segmented_attention_without_softmax_is_no_kernel() -> None:
    x = jnp.zeros((2, 64, 2, 64), "bfloat16")
    for changes in ({"kind": "local_global"}, {"use_segment": False}, {"training_form": "slots"}):
        said = segmented.gpu_refusal(dataclasses.replace(CROSS, **changes), x, 64)
        assert said is not None and said.startswith("is the softmax attention (use_segment) of")


@pytest.mark.parametrize(
    ("capability", "name"),
    [("8.0", "NVIDIA A100-SXM4-80GB"), ("10.0", "NVIDIA B200")],
)
def test_other_gpus_take_plain_xla(capability: str, name: str) -> None:
    device = SimpleNamespace(compute_capability=capability, device_kind=name)
    x = jnp.zeros((2, 64, 2, 64), "bfloat16")
    with dispatch.use_backend("gpu", device):
        assert gpu.refusal(x, 64, 64) == (
            f"is cut for GPUs of compute capability 9.0 (H100, H200), not {capability}"
        )


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
    assert last in refused and IS_KERNEL not in used("window")


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
        used("window")
