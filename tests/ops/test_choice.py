"""Which implementation computes an op on each backend, and what the kernels refuse."""

import dataclasses
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from cases import KERNEL, V4

from brt.config import Attention, CrossAttention, Mesh
from brt.distributed.mesh import build
from brt.layers.attention_kinds import clustered_config
from brt.layers.basic import remat_policy
from brt.layers.seq2seq import cross_config
from brt.ops import causal_clustered_attention as causal
from brt.ops import clustered_attention, cross_attention, dispatch, masked_attention
from brt.ops.attention import gpu
from brt.ops.cross_entropy import cross_entropy
from brt.ops.dropout import Dropout, DropoutMask
from brt.ops.gates import GateWeights
from brt.ops.partial_attention import AttentionPart
from brt.ops.recurrent_attention import CellWeights, state_scan
from brt.ops.softmax_attention import attend, attend_to_blocks
from brt.ops.window_attention import local_attention, window_part

# What the program of a kernel has.
SIGN = {"tpu": "pallas_call", "gpu": "copy_gmem_to_smem", "cpu": "pallas_call"}
BF16 = "bfloat16"
DROPOUT = Dropout(jax.random.key(0), 0.1)


def window(x: jax.Array, drops: bool = False, size: int = 0, **option: Any) -> Any:
    size = size or x.shape[1]
    mask = DropoutMask(jnp.ones((x.shape[2], size, size), bool), 1.25) if drops else None
    flags = jnp.ones((len(x), x.shape[1] // size), bool)
    cached = x[:, :size], x[:, :size]
    return window_part(x, cached, x, x, jnp.zeros((x.shape[2], size)), flags, mask, **option)


def local(x: jax.Array, size: int = 128, block: int = 128, **option: Any) -> Any:
    cached = (jnp.zeros((len(x), size, *x.shape[2:]), x.dtype),) * 2
    first = jnp.zeros((len(x), x.shape[1] // block), jnp.int32)
    return local_attention(x, cached, x, x, None, first, **option)


def masked(x: jax.Array, **option: Any) -> Any:
    mask = jnp.ones((len(x), 1, x.shape[1]), bool)
    return masked_attention.attend(x, x, x, None, mask, **option)


def states(x: jax.Array, **option: Any) -> Any:
    keys = jnp.concatenate([x, x], axis=1).swapaxes(1, 2)
    flags = jnp.ones(len(x), bool)
    return attend_to_blocks(x, keys, keys, flags, null_keys=False, **option)


def cross(
    x: jax.Array, sources: int = 64, config: dict[str, Any] | None = None, **option: Any
) -> Any:
    settings = cross_config(CrossAttention(kind="srformer", segment_size=32))
    settings = dataclasses.replace(settings, **config or {})
    initial = partial(cross_attention.initial_parameters, jax.random.key(0), settings)
    k = jnp.zeros((len(x), sources, *x.shape[2:]), x.dtype)
    valid = jnp.ones((len(x), sources), bool)
    return cross_attention.attend(x, k, k, valid, initial(*x.shape[2:]), settings, **option)


def clustered(
    x: jax.Array, values: int = 0, kind: str = "improved_clustered", **option: Any,
) -> Any:  # fmt: skip
    config = Attention(kind=kind, clusters=5, top_k=6)
    valid, labels = jnp.ones(x.shape[:2], bool), jnp.zeros((len(x), x.shape[2], x.shape[1]), int)
    return clustered_attention.attend_by_label(
        x, x, x[..., : values or None], valid, labels, clustered_config(config), scale=1.0,
        **option,
    )  # fmt: skip


def causal_clustered(x: jax.Array, clusters: int = 16, slots: int = 8, **option: Any) -> Any:
    lanes, _, heads, width = x.shape
    memory = jnp.zeros((1, lanes, heads, clusters, slots, width), x.dtype)
    rest = jnp.zeros((1, lanes, heads, clusters, width))
    past = causal.CentroidMemory(
        memory, memory, rest, rest[..., 0], jnp.full((1, lanes), slots)
    )  # fmt: skip
    centroids = causal.Centroids(rest[0, 0], rest[0, 0, :, :, 0])
    part, both = AttentionPart(x, jnp.zeros(x.shape[:3])), jnp.concatenate([x, x], axis=1)
    flags = jnp.ones((lanes, 1), bool)
    return causal.causal_clustered_attention(
        x, part, both, both, flags, past, centroids, jnp.zeros(heads), **option
    )


def recurrent(x: jax.Array, states: int = 128, **option: Any) -> Any:
    width, flags = x.shape[-1], jnp.ones((len(x), 1), bool)
    vectors, of_heads = jnp.zeros((len(x), states, width)), jnp.ones((x.shape[2],))
    projections = [jnp.zeros((width, x.shape[2], width))] * 4
    weights = CellWeights(vectors[0, 0], vectors[0], *projections, of_heads, of_heads)
    weights = weights._replace(output=jnp.zeros((2, *x.shape[2:], width)))
    weights = weights._replace(output_gate=GateWeights(jnp.zeros(width)))
    return state_scan(
        weights, vectors[0], vectors, (x, x), x, x, flags, flags, kind="fixed",
        normalize_qk=True, null_keys=False, **option,
    )  # fmt: skip


def loss(x: jax.Array, vocabulary: int = 256, biased: bool = False, **option: Any) -> Any:
    hidden, bias = x[:, :, 0], jnp.zeros(vocabulary) if biased else None
    targets = jnp.zeros(x.shape[:2], jnp.int32)
    return cross_entropy(
        hidden, jnp.zeros((vocabulary, x.shape[-1])), targets, targets == 0, bias, scale=1.0,
        chunk=128, **option,
    )  # fmt: skip


KINDS: dict[str, Callable[..., Any]] = {
    "window": window, "local": local, "states": states,
    "softmax": lambda x, **option: attend(x, x, x, **option), "masked": masked, "cross": cross,
    "clustered": clustered, "causal clustered": causal_clustered, "recurrent": recurrent,
    "loss": loss,
}  # fmt: skip


def traced(
    kind: str, backend: str, device: Any = None, *, tokens: int = 128, width: int = 64,
    heads: int = 2, dtype: str = BF16, **options: Any,
) -> str:  # fmt: skip
    """Returns the jaxpr of a kind of op on a backend, with its gradients."""

    def total(x: jax.Array) -> jax.Array:
        y = jax.tree.leaves(KINDS[kind](x, **options))[0]
        return jnp.sum(jnp.sin(y.astype(jnp.float32)))

    x = jax.ShapeDtypeStruct((2, tokens, heads, width), dtype)
    with dispatch.use_backend(backend, device):
        return str(jax.make_jaxpr(jax.grad(total))(x))


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_trains_by_the_kernels_of_tpus_and_cpus_refuse_them(kind: str) -> None:
    assert SIGN["tpu"] in traced(kind, "tpu")
    assert SIGN["tpu"] not in traced(kind, "cpu")
    with pytest.raises(NotImplementedError, match="runs on tpu, not on cpu"):
        traced(kind, "cpu", implementation="pallas_tpu")


ON_GPUS = "window", "local", "states", "masked", "cross", "clustered", "causal clustered"


@pytest.mark.parametrize("kind", ON_GPUS)
def test_each_kind_of_attention_trains_by_the_kernels_of_gpus(kind: str) -> None:
    text = traced(kind, "gpu")
    assert "attention_keys" in text and SIGN["gpu"] in text
    assert SIGN["gpu"] not in traced(kind, "gpu", dtype="float32")


FLOATS, HEADS = "float32 and bfloat16, not in float16", "heads of 64, 128 or 256, not of 48"
SLABS = "multiple of 128 queries and of 128 keys, not 100 and 100"
REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("tpu", "window", {"tokens": 100}, "multiple of 128 tokens, at most 2048 at once, not of 100"),
    ("tpu", "window", {"tokens": 2048, "drops": True},
     "16 MiB of it at most, not 31 for a window of 2048 with heads of 64 in bfloat16"),
    ("tpu", "masked", {"tokens": 100}, SLABS),
    ("tpu", "softmax", {"tokens": 100}, SLABS),
    *(("tpu", kind, {"width": 48}, HEADS)
      for kind in ("window", "masked", "softmax", "clustered", "causal clustered", "recurrent")),
    *(("tpu", kind, {"dtype": "float16"}, FLOATS)
      for kind in ("window", "masked", "softmax", "clustered", "causal clustered", "recurrent",
                   "cross", "loss")),
    ("tpu", "causal clustered", {"tokens": 100}, "multiple of 128 tokens, .* not 100 and 16 x 8"),
    ("tpu", "causal clustered", {"clusters": 5}, "not 128 and 5 x 8"),
    ("gpu", "causal clustered", {"clusters": 5}, "of 64 keys, not 128 and 40"),
    ("gpu", "causal clustered", {"tokens": 32}, "multiple of 64 queries .*, not 32 and 128"),
    ("gpu", "window", {"tokens": 48}, "takes a multiple of 64 queries and of 64 keys, not 48 and"),
    ("gpu", "local", {"width": 48}, HEADS),
    ("gpu", "states", {"dtype": "float32"}, "computes in bfloat16 and float16, not in float32"),
    ("gpu", "masked", {"tokens": 96}, "a multiple of 64 queries and of 64 keys, not 96 and 96"),
    ("gpu", "cross", {"tokens": 96}, "takes a multiple of 64 queries .*, not 96 and 64"),
    *(("gpu", "cross", {"config": config}, r"is the softmax attention \(use_segment\) of Cross")
      for config in ({"kind": "local_global"}, {"use_segment": False}, {"training_form": "slots"})),
    ("gpu", "clustered", {"width": 32}, "has heads of 64, 128 or 256, not of 32"),
    *((backend, "clustered", {"width": 128} | changes, reason)
      for backend in ("tpu", "gpu") for changes, reason in (
        ({"values": 64}, "has keys and values of one size, not of 128 and 64"),
        ({"dropout": DROPOUT}, "has no dropout; set its rate to 0"),
        ({"bias": jnp.zeros((2, 255))}, "has no bias of distances"),
    )),
    ("tpu", "recurrent", {"states": 100}, "of 128 states and of 128 tokens, not 100 and 128"),
    ("tpu", "recurrent", {"tokens": 100}, "of 128 states and of 128 tokens, not 128 and 100"),
    ("tpu", "recurrent", {"states": 1024, "tokens": 1024, "width": 128}, "at most, not 24"),
    ("tpu", "recurrent", {"attention": "xla"}, "not by 'xla' of softmax_attention"),
    ("tpu", "cross", {"config": {"kind": "xl_memory"}}, r"with its neurons \(use_raf"),
    ("tpu", "cross", {"config": {"clamp": 2.0}}, "does not clamp sums"),
    ("tpu", "cross", {"width": 32}, "has heads of 64 or 128, not of 32"),
    ("tpu", "cross", {"heads": 3}, "takes heads of 64 in pairs; a device has 3"),
    ("tpu", "cross", {"config": {"segment_size": 10}}, "a multiple of 8 tokens, not of 10"),
    ("tpu", "cross", {"sources": 1 << 15}, "a source on the chip, 14 MiB of it at most, not 128"),
    ("tpu", "loss", {"tokens": 100}, "multiples of 128 tokens .*, not 100 and 256"),
    ("tpu", "loss", {"vocabulary": 250}, "multiples of 128 tokens .*, not 128 and 250"),
    ("tpu", "loss", {"width": 1 << 14, "dtype": "float32"}, "of 16384 numbers are too long"),
    ("tpu", "loss", {"biased": True}, "adds no bias to logits"),
]  # fmt: skip


@pytest.mark.parametrize(("backend", "kind", "changes", "reason"), REFUSED)
def test_what_a_kernel_does_not_support_is_said(
    backend: str, kind: str, changes: dict[str, Any], reason: str
) -> None:
    device = V4 if backend == "tpu" else None
    with pytest.raises(NotImplementedError, match=reason):
        traced(kind, backend, device, **changes, implementation=f"pallas_{backend}")


@pytest.mark.parametrize(("backend", "changes"), [("tpu", {"tokens": 96}), ("gpu", {"tokens": 48})])
def test_what_a_kernel_refuses_is_left_to_the_compiler(
    backend: str, changes: dict[str, Any]
) -> None:
    for kind in ("window", "masked", "causal clustered"):
        assert SIGN[backend] not in traced(kind, backend, **changes)
    assert SIGN[backend] in traced("masked", backend, dropout=DROPOUT)


@pytest.mark.parametrize(
    ("size", "reason"),
    [
        (80, "multiple of the window of 80 tokens, not of 128"),
        (64, "has no dropout; set its rate to 0"),
    ],
)
def test_the_interpreted_kernel_refuses_what_it_does_not_compute(size: int, reason: str) -> None:
    with pytest.raises(NotImplementedError, match=reason):
        traced("local", "cpu", size=size, implementation=KERNEL, dropout=DROPOUT)


@pytest.mark.slow_cases("tpu-8192-*", "tpu-640-*", "gpu-2040-*")
@pytest.mark.parametrize(
    ("backend", "size", "block", "tokens", "dtype", "kernel"),
    [
        ("tpu", 2048, 256, 4096, BF16, True),
        ("tpu", 512, 256, 4096, "float32", True),
        ("tpu", 2048, 256, 3072, BF16, True),  # two sub-windows of 1,024
        ("tpu", 2048, 256, 2304, BF16, False),  # no multiple of 512
        ("tpu", 2048, 64, 4096, BF16, False),  # blocks smaller than tiles
        ("tpu", 8192, 8192, 8192, BF16, True),
        ("tpu", 640, 256, 5120, BF16, True),
        ("tpu", 600, 256, 5120, BF16, False),
        ("gpu", 2048, 256, 3072, BF16, True),
        ("gpu", 2048, 256, 4096, "float32", False),
        ("gpu", 2040, 64, 4096, BF16, True),
        ("cpu", 2048, 256, 4096, "float32", False),
    ],
)
def test_auto_selects_a_kernel_for_windows_that_it_has(
    backend: str, size: int, block: int, tokens: int, dtype: str, kernel: bool
) -> None:
    trace = partial(traced, "local", backend, tokens=tokens, dtype=dtype, size=size, block=block)
    assert (SIGN[backend] in trace()) == kernel
    if kernel:
        assert SIGN[backend] not in trace(dropout=DROPOUT)


@pytest.mark.parametrize("backend", ["tpu", "gpu"])
@pytest.mark.parametrize("kind", ["local", "causal clustered"])
def test_devices_that_share_a_segment_leave_it_to_the_compiler(kind: str, backend: str) -> None:
    reason = pytest.raises(NotImplementedError, match="set Mesh.sequence to 1")
    with jax.set_mesh(build(Mesh(sequence=2), {})), reason:
        traced(kind, backend, implementation=f"pallas_{backend}")


def test_what_the_kernel_gave_is_kept_as_it_is() -> None:
    """The output is saved as unsigned integers, because JAX rounds saved floating-point arrays."""

    def layer(x: jax.Array) -> jax.Array:
        part = window(x, implementation="pallas_tpu")
        return jnp.sum(jnp.sin(part.output.astype(jnp.float32)))

    kept = jax.grad(jax.checkpoint(layer, policy=remat_policy("products")))
    with dispatch.use_backend("tpu"):
        text = str(jax.make_jaxpr(kept)(jnp.zeros((1, 128, 2, 64), BF16)))
    assert "name[name=kernel]" in text and "reduce_precision" not in text


def test_a_window_without_room_on_a_chip_is_split_unless_it_has_dropout() -> None:
    found = [traced("window", "tpu", V4, tokens=2048, drops=drops) for drops in (False, True)]
    assert [text.count("name=window_attention_") for text in found] == [2, 0]


@pytest.mark.parametrize(
    ("capability", "name"), [("8.0", "NVIDIA A100-SXM4-80GB"), ("10.0", "NVIDIA B200")]
)
def test_other_gpus_take_plain_xla(capability: str, name: str) -> None:
    device = SimpleNamespace(compute_capability=capability, device_kind=name)
    x = jnp.zeros((2, 64, 2, 64), BF16)
    with dispatch.use_backend("gpu", device):
        assert gpu.refusal(x, 64, 64) == (
            f"is cut for GPUs of compute capability 9.0 (H100, H200), not {capability}"
        )
