"""Compares the TPU kernel of the whole recurrent cell, interpreted, with plain XLA and its
autodiff.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from brt.config import Mesh
from brt.distributed.mesh import build
from brt.layers.basic import remat_policy
from brt.ops import dispatch
from brt.ops.gates import GateWeights
from brt.ops.normalization import l2_normalize
from brt.ops.recurrent_attention import CellWeights, state_scan, tpu_cell, xla

HEADS, SIZE, WIDTH, BLOCKS = 2, 8, 12, 3
WATCHED = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
FIXED = {"kind": "fixed", "tanh": "original"}


def inputs(
    lanes: int = 2, states: int = 24, window: int = 16, dtype: str = "float32", scale: float = 2.0
) -> tuple[list[Any], list[jax.Array]]:
    """Returns differentiable arrays (weights, states, tokens), and masks [lanes, blocks] of the
    blocks that may read the cache and of the blocks that start a document.
    """
    rng = np.random.default_rng(0)

    def normal(*shape: int, dtype: str = "float32") -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), dtype)

    def kernel(*shape: int, inputs: int) -> jax.Array:
        return normal(*shape) * inputs**-0.5

    by_head = [kernel(WIDTH, HEADS, SIZE, inputs=WIDTH) for _ in range(4)]
    scales = [jnp.asarray(scale * rng.uniform(0.5, 1.0, size=HEADS), jnp.float32) for _ in range(2)]
    output = kernel(2, HEADS, SIZE, WIDTH, inputs=2 * HEADS * SIZE)
    weights = CellWeights(
        normal(WIDTH), normal(states, WIDTH), *by_head, *scales, output, GateWeights(normal(WIDTH))
    )
    cached, tokens = ((lanes, n * window, HEADS, SIZE) for n in (1, BLOCKS))
    arrays = [
        weights, normal(states, WIDTH), normal(lanes, states, WIDTH),
        (normal(*cached, dtype=dtype), normal(*cached, dtype=dtype)),
        normal(*tokens, dtype=dtype), normal(*tokens, dtype=dtype),
    ]  # fmt: skip
    # Documents start at different blocks in different lanes.
    starts = (np.arange(lanes)[:, None] + 2 * np.arange(BLOCKS)) % 3 == 1
    return arrays, [jnp.asarray(~starts), jnp.asarray(starts)]


def both_passes(scan: Callable, arrays: list[Any], flags: list[jax.Array]) -> list[np.ndarray]:
    """Returns the states, the keys and values that tokens read from the states, and all
    gradients.
    """

    @jax.jit
    def run(arrays: list[Any]) -> Any:
        outputs, backward = jax.vjp(lambda *x: scan(*x, *flags), *arrays)
        numbers = jax.tree.map(lambda x: jnp.sin(jnp.arange(x.size)).reshape(x.shape), outputs)
        return outputs, backward(jax.tree.map(lambda n, x: n.astype(x.dtype), numbers, outputs))

    return [np.asarray(x, np.float64) for x in jax.tree.leaves(run(arrays))]


def plain(
    weights: CellWeights, initial: Any, vectors: Any, cached: Any, keys: Any, *others: Any,
    normalize_qk: bool, **options: Any,
) -> Any:  # fmt: skip
    """Returns the results of plain XLA, with the tokens' keys normalized before if asked for."""
    if normalize_qk:
        cached, keys = (l2_normalize(cached[0]), cached[1]), l2_normalize(keys)
    return xla.state_scan(
        weights, initial, vectors, cached, keys, *others, normalize_qk=normalize_qk, **options
    )


def assert_close(found: list[Any], expected: list[Any], tolerance: float) -> None:
    """Compares arrays; the tolerance is relative to the largest magnitude of each array."""
    for one, wanted in zip(found, expected, strict=True):
        assert np.abs(one - wanted).max() <= tolerance * np.abs(wanted).max()


@pytest.mark.slow_cases(
    "bfloat16-0.06-1-False-False", "float32-1e-05-3-True-True", "float32-1e-05-1-False-False"
)
@pytest.mark.parametrize(
    ("lanes", "normalizes", "null_keys"),
    [(1, False, False), (3, True, True), pytest.param(3, True, False, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 6e-2)])
def test_equals_plain_xla_in_float32(
    dtype: str, tolerance: float, lanes: int, normalizes: bool, null_keys: bool
) -> None:
    arrays, flags = inputs(lanes, dtype=dtype, scale=2.0 if normalizes else SIZE**-0.5)
    options = {"normalize_qk": normalizes, "null_keys": null_keys}
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), arrays)
    expected = both_passes(partial(plain, **options, **FIXED), wide, flags)
    kernel = partial(tpu_cell.state_scan, interpret=True, **options)
    assert_close(both_passes(kernel, arrays, flags), expected, tolerance)


OPTIONS = {"normalize_qk": True, "null_keys": True}


@pytest.mark.slow  # test_recurrent_kernel.py has a quick test of unwritten memory and races.
def test_reads_nothing_unwritten_and_repeats_bit_by_bit(capfd: pytest.CaptureFixture) -> None:
    arrays, flags = inputs()
    kernel = partial(tpu_cell.state_scan, interpret=WATCHED, **OPTIONS)
    first, again = (both_passes(kernel, arrays, flags) for _ in range(2))
    assert_close(first, both_passes(partial(plain, **OPTIONS, **FIXED), arrays, flags), 5e-6)
    for found, repeated in zip(first, again, strict=True):
        np.testing.assert_array_equal(found, repeated)
    assert "RACE" not in capfd.readouterr().out


@pytest.mark.slow
def test_two_segments_equal_one() -> None:
    """Gradients also flow from the second segment into the first, by states and by cached
    tokens.
    """
    arrays, flags = inputs(window=16)
    scan = partial(tpu_cell.state_scan, interpret=True, **OPTIONS)

    def halves(
        weights: Any, initial: Any, vectors: Any, cached: Any, keys: Any, values: Any, *flags: Any
    ) -> Any:
        first, second = ([x[:, cut] for x in (keys, values)] for cut in np.s_[:16, 16:])
        before, after = ([x[:, cut] for x in flags] for cut in np.s_[:1, 1:])
        vectors, shown = scan(weights, initial, vectors, cached, *first, *before)
        vectors, more = scan(weights, initial, vectors, tuple(first), *second, *after)
        both = zip(shown, more, strict=True)
        return vectors, type(shown)(*(jnp.concatenate(pair, axis=1) for pair in both))

    assert_close(both_passes(halves, arrays, flags), both_passes(scan, arrays, flags), 5e-6)


@pytest.mark.slow  # test_recurrent_kernel.py has a quick test of several devices.
@pytest.mark.parametrize("mesh", [Mesh(data=2, sequence=4), Mesh(data=2, fsdp=4)])
def test_devices_read_each_for_itself(mesh: Mesh) -> None:
    arrays, flags = inputs(lanes=8)
    scan = partial(tpu_cell.state_scan, interpret=True, **OPTIONS)
    expected = both_passes(scan, arrays, flags)
    with jax.set_mesh(build(mesh, {})):
        found = both_passes(scan, arrays, flags)
    assert_close(found, expected, 5e-6)


def test_devices_gather_weights_in_the_dtype_that_the_kernel_reads() -> None:
    """The kernels return only arrays that are split by lane, so no gradient of a whole weight is
    exchanged.
    """
    arrays, flags = inputs(lanes=8, dtype="bfloat16")

    def gradients(arrays: list[Any]) -> Any:
        found, backward = jax.vjp(
            lambda *x: tpu_cell.state_scan(*x, *flags, interpret=True, **OPTIONS), *arrays
        )
        return backward(found)

    with jax.set_mesh(build(Mesh(fsdp=8), {})):
        traced = jax.make_jaxpr(gradients)(arrays)
    whole, lanes = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("fsdp")
    passes = [eqn for eqn in traced.eqns if eqn.primitive.name == "shard_map"]
    assert len(passes) == 2
    for eqn in passes:
        pairs = zip(eqn.invars, eqn.params["in_specs"], strict=True)
        gathered = [x.aval for x, spec in pairs if spec == whole]
        kernels = [x.dtype for x in gathered if x.shape[-2:] in ((WIDTH, SIZE), (SIZE, WIDTH))]
        assert kernels == ["bfloat16"] * 5
        assert set(eqn.params["out_specs"]) == {lanes}


@pytest.mark.parametrize(("keep", "calls"), [("nothing", 3), ("products", 2)])
def test_layers_that_keep_products_run_forward_once(keep: Any, calls: int) -> None:
    """Also tests that this holds if the rest of a layer reads the keys and values of the states."""
    arrays, flags = inputs()

    def layer(arrays: list[Any]) -> jax.Array:
        found = tpu_cell.state_scan(*arrays, *flags, interpret=True, **OPTIONS)
        return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(found))

    gradients = jax.grad(jax.checkpoint(layer, policy=remat_policy(keep)))
    assert kernels_that_are_read(jax.make_jaxpr(gradients)(arrays).jaxpr) == calls


def kernels_that_are_read(jaxpr: Any) -> int:
    """Returns the number of Pallas calls whose results are used. JAX keeps unused calls, and XLA
    removes them later.
    """
    read = {id(x) for eqn in jaxpr.eqns for x in eqn.invars} | {id(x) for x in jaxpr.outvars}
    found = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            found += any(id(x) in read for x in eqn.outvars)
        elif "jaxpr" in eqn.params:
            inner = eqn.params["jaxpr"]
            found += kernels_that_are_read(getattr(inner, "jaxpr", inner))
    return found


def chip(kind: str) -> SimpleNamespace:
    """Returns a device of this kind of TPU."""
    return SimpleNamespace(device_kind=f"TPU {kind}")


def paper(
    lanes: int = 2, states: int = 512, window: int = 512, dim: int = 1024, width: int = 128,
    dtype: str = "bfloat16", layout: str = "skip",
) -> list[Any]:  # fmt: skip
    """Returns shapes of the kernel's arguments, by default those of the paper's cell."""

    def array(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    by_head = [array(dim, 8, width)] * 4
    weights = CellWeights(
        array(dim), array(states, dim), *by_head, array(8), array(8), array(2, 8, width, dim),
        GateWeights(array(dim)),
    )  # fmt: skip
    if layout != "skip":
        weights = weights._replace(mlp_in=array(dim, dim))
    if layout == "single":
        weights = weights._replace(output=None)
    tokens, flags = array(lanes, window, 8, width, dtype=dtype), array(lanes, 1, dtype="bool")
    vectors = array(lanes, states, dim)
    return [weights, array(states, dim), vectors, (tokens, tokens), tokens, tokens, flags, flags]


@pytest.mark.parametrize(
    ("kind", "shape", "changes", "reason"),
    [
        ("v5 lite", {"lanes": 1}, {}, None),
        ("v5", {"lanes": 2}, {}, None),
        ("v5", {"lanes": 1}, {}, "sequences for each of 2 cores of a chip, not 1 of them"),
        ("v4", {}, {}, "on the chip, 14 MiB of it at most, not 55"),
        ("v5 lite", {"states": 1024}, {}, "on the chip, 62 MiB of it at most, not 93"),
        ("v5 lite", {"dtype": "float32"}, {}, "on the chip, 62 MiB of it at most, not 67"),
        ("v5 lite", {"dtype": "float32", "states": 384, "window": 384}, {}, None),
        ("v5 lite", {"states": 640, "window": 896, "dim": 768}, {}, "62 MiB of it at most, not 63"),
        ("v5 lite", {"states": 96}, {}, "not 96, 512 and 1024"),
        ("v5 lite", {"dim": 960}, {}, "not 512, 512 and 960"),
        ("v5 lite", {"width": 64}, {}, "heads of 128 or 256 in float32 or bfloat16, not of 64"),
        ("v5 lite", {"dtype": "float16"}, {}, "not of 128 in float16"),
        ("v5 lite", {}, {"kind": "lstm"}, "in the layout 'skip' only, not 'lstm' in 'skip'"),
        ("v5 lite", {"layout": "dual"}, {}, "the layout 'skip' only, not 'fixed' in 'dual'"),
        ("v5 lite", {"layout": "single"}, {}, "the layout 'skip' only, not 'fixed' in 'single'"),
        ("v5 lite", {}, {"taps": jnp.zeros(1)}, "not a block of a loop over them"),
        ("v5 lite", {}, {"attention": "xla"}, "not by 'xla' of softmax_attention"),
    ],
)
def test_what_the_kernel_does_not_support_is_said(
    kind: str, shape: dict[str, Any], changes: dict[str, Any], reason: str | None
) -> None:
    said: list[str | None] = []
    with dispatch.use_backend("tpu", chip(kind)):
        jax.eval_shape(
            lambda *x: said.append(tpu_cell.refusal(*x, **FIXED | changes)), *paper(**shape)
        )
    assert said == [None] if reason is None else reason in said[0]


def test_heads_that_devices_share_are_refused() -> None:
    said: list[str | None] = []
    with dispatch.use_backend("tpu", chip("v5 lite")), jax.set_mesh(build(Mesh(tensor=8), {})):
        jax.eval_shape(lambda *x: said.append(tpu_cell.refusal(*x, **FIXED)), *paper())
    assert said == ["has all heads on one device, not on 8 that share them (Mesh.tensor)"]


def test_a_named_kernel_that_cannot_raises() -> None:
    arrays, flags = inputs()
    reason = "not 24, 16 and 12"
    with (
        dispatch.use_backend("tpu", chip("v5 lite")),
        pytest.raises(NotImplementedError, match=reason),
    ):
        state_scan(*arrays, *flags, **OPTIONS, **FIXED, implementation="pallas_tpu_cell")
