"""Compares the costs that are counted in a compiled module with the operations of its source."""

import jax
import jax.numpy as jnp
import pytest

from brt.config import Mesh
from brt.distributed.mesh import build
from brt.planning import compiled, kernel_cycles, topologies
from brt.planning.compiled import CollectiveCost, costs, part_of

ROWS, WIDTH, LAYERS = 8, 32, 5


def layers(x: jax.Array, kernels: jax.Array) -> jax.Array:
    def layer(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, None]:
        with jax.named_scope("mlp"):
            return jnp.tanh(x @ kernel), None

    return jax.lax.scan(layer, x, kernels)[0]


def test_a_loop_counts_as_often_as_it_runs() -> None:
    x, kernels = jnp.ones((ROWS, WIDTH)), jnp.ones((LAYERS, WIDTH, WIDTH))
    found = costs(jax.jit(layers).lower(x, kernels).compile().as_text())
    assert found.total.flops == LAYERS * 2 * ROWS * WIDTH**2
    assert found.parts["MLP and output"].flops == found.total.flops
    assert found.total.bytes >= 4 * kernels.size, "every kernel is read"
    assert found.total.bytes < 4 * LAYERS * kernels.size, "and not all of them in each layer"
    assert not found.collectives


def test_a_kernel_of_a_gpu_takes_as_long_as_its_products_or_bytes_and_its_start() -> None:
    size, clock = 1 << 13, topologies.CHIPS["h100"].clock
    text = """
ENTRY %main (a: bf16[8192,8192]) -> bf16[8192,8192] {
  %a = bf16[8192,8192]{1,0} parameter(0)
  %dot = bf16[8192,8192]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %negate = bf16[8192,8192]{1,0} negate(%dot)
}
"""
    expected = 2 * size**3 / 748e12 + 2 * 2 * size**2 / 3e12 + 2 * 2e-6
    assert costs(text, "h100").total.cycles / clock == pytest.approx(expected, rel=1e-3)


def test_layers_instructions_are_listed_as_one() -> None:
    def straight(x: jax.Array, kernels: jax.Array) -> jax.Array:
        for n, kernel in enumerate(kernels):
            with jax.named_scope(f"layer_{n}"):
                x = jnp.tanh(x @ kernel)
        return x

    x, kernels = jnp.ones((ROWS, WIDTH)), jnp.ones((LAYERS, WIDTH, WIDTH))
    found = costs(jax.jit(straight).lower(x, kernels).compile().as_text())
    (product,) = (one for one in found.instructions if one.cost.flops)
    assert product.times == LAYERS and product.cost.flops == found.total.flops
    assert product.result == f"f32[{ROWS},{WIDTH}]" and "layer_#" in product.source
    assert sum(one.cost.bytes for one in found.instructions) == found.total.bytes


def test_collectives_are_counted_with_their_bytes() -> None:
    mesh = build(Mesh(data=8), {})
    lanes = jax.NamedSharding(mesh, jax.P("data"))
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32, sharding=lanes)
    whole = jax.NamedSharding(mesh, jax.P())
    summed = jax.jit(lambda x: jnp.sum(x, axis=0), out_shardings=whole).lower(x).compile()
    (kind,) = (moved := costs(summed.as_text()).collectives)
    assert kind == "all-reduce" and moved[kind] == (1, 4 * WIDTH)


@pytest.mark.parametrize(
    ("operation", "kinds", "operands", "size"),
    [
        ("collective-permute", "(f32[16]{0}, f32[16]{0}, u32[], u32[])", "%a", 16),
        ("collective-permute", "((f32[16], f32[8]), (f32[16], f32[8]), u32[])", "%a, %b", 24),
        ("all-gather", "(f32[16]{0}, f32[64]{0})", "%a", 64),
        ("all-gather", "((f32[16], f32[8]), (f32[64], f32[32]))", "%a, %b", 96),
        ("all-reduce", "f32[16]{0}", "%a", 16),
        ("all-reduce", "(f32[16]{0}, f32[8]{0})", "%a, %b", 24),
        ("reduce-scatter", "((f32[16]{0}), f32[4]{0}, u32[], u32[])", "%a", 4),
        ("all-to-all", "((f32[16]{0}), f32[16]{0}, s32[])", "%a", 16),
    ],
)
def test_a_collective_that_is_started_moves_its_results_once(
    operation: str, kinds: str, operands: str, size: int
) -> None:
    """The operands, the compiler's context values and the matching -done instruction do not
    count.
    """
    text = f"""
ENTRY %main (a: f32[16], b: f32[8]) -> f32[16] {{
  %a = f32[16]{{0}} parameter(0)
  %b = f32[8]{{0}} parameter(1)
  %s = {kinds} {operation}-start({operands})
  ROOT %d = f32[16]{{0}} {operation}-done(%s)
}}
"""
    found = costs(text)
    assert found.collectives == {operation: (1, 4 * size)}
    assert not found.parts


def test_a_collective_that_runs_beside_other_instructions_is_counted_with_their_cycles() -> None:
    text = """
%fused (p: bf16[8]) -> (bf16[8], bf16[64]) {
  %p = bf16[8]{0} parameter(0)
  %gathered = bf16[64]{0} all-gather(%p), dimensions={0}
  ROOT %t = (bf16[8]{0}, bf16[64]{0}) custom-call(%p, %gathered), custom_call_target="Start"
}

ENTRY %main (a: bf16[8], x: f32[16]) -> bf16[64] {
  %a = bf16[8]{0} parameter(0)
  %x = f32[16]{0} parameter(1)
  %before = f32[16]{0} negate(%x), backend_config={"estimated_cycles":"5"}
  %async-collective-start.1 = (bf16[8]{0}, bf16[64]{0}) fusion(%a), kind=kCustom, calls=%fused
  %during = f32[16]{0} negate(%before), backend_config={"estimated_cycles":"7"}
  %s = f32[16]{0} all-reduce-start(%during), to_apply=%fused
  %also = f32[16]{0} negate(%during), backend_config={"estimated_cycles":"11"}
  %e = f32[16]{0} all-reduce-done(%s)
  ROOT %async-collective-done.1 = bf16[64]{0} fusion(%async-collective-start.1), calls=%done
}
"""
    found = costs(text)
    assert found.collectives == {"all-gather": (1, 128), "all-reduce": (1, 64)}
    assert found.overlaps == (("all-reduce", 1, 64, 11.0), ("all-gather", 1, 128, 18.0))
    assert found.total.cycles == 23


def test_types_are_read_with_their_memory() -> None:
    found = compiled.shapes("(bf16[2,3]{1,0:T(8,128)(2,1)S(1)}, f32[], pred[7]{0})")
    assert [(s.dtype, s.dimensions, s.bytes, s.on_chip) for s in found] == [
        ("bf16", (2, 3), 12, True), ("f32", (), 4, False), ("pred", (7,), 7, False)
    ]  # fmt: skip


def test_a_batched_product_that_a_tpu_writes_as_a_convolution() -> None:
    """The convolution computes [B, M, K] x [B, N, K]: its window slides over the batch, and covers
    one example at a time.
    """
    text = """
ENTRY %main (a: f32[4,8,16], b: f32[4,32,16]) -> f32[4,8,32] {
  %a = f32[4,8,16]{2,1,0} parameter(0)
  %b = f32[4,32,16]{2,1,0} parameter(1)
  ROOT %c = f32[4,8,32]{2,1,0} convolution(%a, %b), ATTRIBUTES
}
"""
    window = "window={size=4 stride=3 pad=0_0 lhs_dilate=4}, dim_labels=0bf_0oi->0bf"
    cycles = 'backend_config={"estimated_cycles":"77"}'
    found = costs(text.replace("ATTRIBUTES", f"{window}, {cycles}"))
    assert found.total.flops == 2 * 4 * 8 * 32 * 16 and found.total.cycles == 77


def test_a_fusion_reads_the_slices_of_what_its_own_fusions_slice() -> None:
    """On TPUs, a loop that takes one of many slices does not read the other slices."""
    text = """
%inner (p: f32[64,8,16], i: s32[]) -> f32[8,16] {
  %p = f32[64,8,16]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %whole = f32[64,128]{1,0} bitcast(%p)
  %d = f32[1,128]{1,0} dynamic-slice(%whole, %i, %i), dynamic_slice_sizes={1,128}
  ROOT %r = f32[8,16]{1,0} bitcast(%d)
}

%outer (q: f32[64,8,16], j: s32[]) -> f32[8,16] {
  %q = f32[64,8,16]{2,1,0} parameter(0)
  %j = s32[] parameter(1)
  %f = f32[8,16]{1,0} fusion(%q, %j), kind=kLoop, calls=%inner
  ROOT %n = f32[8,16]{1,0} USE
}

ENTRY %main (a: f32[64,8,16], k: s32[]) -> f32[8,16] {
  %a = f32[64,8,16]{2,1,0} parameter(0)
  %k = s32[] parameter(1)
  ROOT %c = f32[8,16]{1,0} fusion(%a, %k), kind=kOutput, calls=%outer
}
"""
    one, index = 4 * 8 * 16, 4
    assert costs(text.replace("USE", "negate(%f)")).total.bytes == 2 * one + index
    whole = costs(text.replace("USE", "custom-call(%f, %q)")).total.bytes
    assert whole == 65 * one + index, "something else reads all of it"


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("operation", "operands", "result", "moved"),
    [
        # The rows, read and written, and their indices.
        ("gather", "%a, %i", "f32[4,8]", 2 * 4 * 8 + 4),
        # Of each row: the old values, the new ones and the result; and the indices.
        ("scatter", "%a, %i, %u", "f32[64,8]", 3 * 4 * 8 + 4),
    ],
)
def test_of_an_indexed_array_the_indexed_rows_are_read(
    fused: bool, operation: str, operands: str, result: str, moved: int
) -> None:
    text = f"""
%inside (a: f32[64,8], i: s32[4], u: f32[4,8]) -> {result} {{
  %a = f32[64,8]{{1,0}} parameter(0)
  %i = s32[4]{{0}} parameter(1)
  %u = f32[4,8]{{1,0}} parameter(2)
  ROOT %r = {result}{{1,0}} {operation}({operands})
}}
"""
    if fused:
        last = text.rindex("ROOT")
        call = f"ROOT %f = {result}{{1,0}} fusion({operands}), kind=kLoop, calls=%inside\n}}\n"
        text += "\n" + text[:last].replace("%inside", "ENTRY %main") + call
    else:
        text = text.replace("%inside", "ENTRY %main")
    assert costs(text).total.bytes == 4 * moved


def test_what_is_started_is_read_and_written_once() -> None:
    """Tests asynchronous copies and slices, some of them into on-chip memory. The type of their
    result also names the operand.
    """
    for operation, kinds, size in (
        ("copy-start", "(f32[64,8]{1,0:S(1)}, f32[64,8]{1,0}, u32[])", 64),
        ("copy-start", "(f32[64,8]{1,0}, f32[64,8]{1,0}, u32[])", 2 * 64),
        ("slice-start", "((f32[64,8]{1,0}), f32[4,8]{1,0:S(1)}, s32[])", 4),
        ("slice", "f32[4,8]{1,0}", 2 * 4),
    ):
        text = f"""
ENTRY %main (a: f32[64,8]) -> f32[4,8] {{
  %a = f32[64,8]{{1,0}} parameter(0)
  ROOT %c = {kinds} {operation}(%a)
}}
"""
        assert costs(text).total.bytes == 4 * 8 * size, kinds


@pytest.mark.parametrize(
    ("array", "update", "large"),
    [("", "", 2), ("", ":S(1)", 1), (":S(1)", "", 1), (":S(1)", ":S(1)", 0)],
)
def test_an_update_in_place_is_of_the_memories_where_both_lie(
    array: str, update: str, large: int
) -> None:
    text = f"""
ENTRY %main (a: f32[64,8], u: f32[4,8], i: s32[]) -> f32[64,8] {{
  %a = f32[64,8]{{1,0{array}}} parameter(0)
  %u = f32[4,8]{{1,0{update}}} parameter(1)
  %i = s32[] parameter(2)
  ROOT %d = f32[64,8]{{1,0{array}}} dynamic-update-slice(%a, %u, %i, %i)
}}
"""
    found, part = costs(text).total, 4 * 4 * 8
    assert found.bytes == large * part and found.bytes_anywhere == 2 * part


def test_bytes_of_all_memories_do_not_ask_where_an_array_lies() -> None:
    """An array that is copied to on-chip memory before it is read counts once."""
    far = """
ENTRY %main (a: f32[64,8]) -> f32[64,8] {
  %a = f32[64,8]{1,0} parameter(0)
  ROOT %n = f32[64,8]{1,0} negate(%a)
}
"""
    near = """
ENTRY %main (a: f32[64,8]) -> f32[64,8] {
  %a = f32[64,8]{1,0} parameter(0)
  %c = f32[64,8]{1,0:S(1)} copy(%a)
  %n = f32[64,8]{1,0:S(1)} negate(%c)
  ROOT %r = f32[64,8]{1,0} copy(%n)
}
"""
    one = 4 * 64 * 8
    assert costs(far).total.bytes_anywhere == costs(far).total.bytes == 2 * one
    assert costs(near).total.bytes_anywhere == 2 * one == costs(near).total.bytes


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("jit(train_step)/jvp(Decoder)/tokens.attend/tokens.finish/dot", "MLP and output"),
        ("jit(train_step)/transpose(jvp(Decoder))/tokens.attend/window_attention/dot", "attention"),
        ("jit(train_step)/optimizer/mul", "optimizer"),
        ("jit(train_step)/jvp()/cross_entropy/while/body/dot", "loss"),
        ("", "other"),
    ],
)  # fmt: skip
def test_parts_are_told_by_their_scopes(source: str, part: str) -> None:
    assert part_of(source) == part


def test_a_kernel_takes_its_schedule_as_often_as_its_grid_runs() -> None:
    text = """
ENTRY %main (q: bf16[8,128]) -> bf16[8,128] {
  %q = bf16[8,128]{1,0} parameter(0)
  ROOT %c = bf16[8,128]{1,0} custom-call(%q), custom_call_target="tpu_custom_call", ATTRIBUTES
}
"""
    for size, times in (("1x512x512x128", 1.0), ("1x1024x1024x256", 8.0)):
        name = f'metadata={{op_name="jit(f)/window_attention_{size}_bfloat16_6_steps"}}'
        cost = '"cost_estimate":{"flops":"99"}'
        found = costs(text.replace("ATTRIBUTES", f"{name}, backend_config={{{cost}}}"), "v5e")
        bundles = kernel_cycles.BUNDLES["window_attention_1x512x512x128"]["v5e"]
        assert found.total.cycles == 6 * times * bundles
        two_cores = costs(text.replace("ATTRIBUTES", name), "v4").total.cycles
        on_v4 = kernel_cycles.BUNDLES["window_attention_1x512x512x128"]["v4"]
        assert two_cores == 3 * times * on_v4
        assert found.total.flops == 99 and found.parts.keys() == {"attention"}
        assert not found.unknown and not found.cycles_at_peak
    at_peak = name + ', backend_config={"cost_estimate":{"flops":"197000000000"}}'
    # These products take a v5e one millisecond, or 1.5e6 cycles, which no schedule can undercut.
    found = costs(text.replace("ATTRIBUTES", at_peak), "v5e")
    assert found.total.cycles == found.cycles_at_peak == 1.5e6
    name = 'metadata={op_name="jit(f)/window_attention_1x512x512x128_float32_6_steps"}'
    found = costs(text.replace("ATTRIBUTES", name), "v5e")
    assert not found.total.cycles
    assert found.unknown == ("window_attention_1x512x512x128_float32",)


def test_what_the_ends_of_a_pass_execute_counts_once_in_a_pass() -> None:
    kernel = "window_attention_backward_1x512x512x128"
    every, ends = (x[kernel]["v5e"] for x in (kernel_cycles.BUNDLES, kernel_cycles.PASS_BUNDLES))
    assert ends > 0
    for name, expected in (
        (f"{kernel}_bfloat16_24_steps_in_3_passes", 24 * every + 3 * ends),
        (f"{kernel}_bfloat16_24_steps", 24 * (every + ends)),
    ):
        assert kernel_cycles.cycles(f'metadata={{op_name="jit(f)/{name}"}}', "v5e") == expected


def test_a_kernel_that_reads_an_array_several_times_states_its_bytes() -> None:
    text = """
ENTRY %main (p: f32[1000,1024]) -> f32[1000,1024] {
  %p = f32[1000,1024]{1,0} parameter(0)
  ROOT %c = f32[1000,1024]{1,0} custom-call(%p), custom_call_target="tpu_custom_call", ATTRIBUTES
}
"""
    name, size = named("adafactor_128x1024", "float32"), 4 * 1000 * 1024
    for stated, expected in ((3 * size, 3 * size), (size, 2 * size)):
        cost = f'backend_config={{"cost_estimate":{{"flops":"0","bytes_accessed":"{stated}"}}}}'
        found = costs(text.replace("ATTRIBUTES", f"{name}, {cost}"), "v5e").total
        assert found.bytes == found.bytes_anywhere == expected
        assert found.cycles == pytest.approx(1.5e9 * expected / 0.82e12)


def named(kernel: str, dtype: str = "bfloat16") -> str:
    """Returns the metadata of an instruction that calls a kernel for one grid step."""
    return f'metadata={{op_name="jit(f)/{kernel}_{dtype}_1_steps"}}'


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_only_of_bfloat16_is_known_how_long_a_kernel_takes(dtype: str) -> None:
    others = {"adafactor": "float32"}
    for kernel, bundles in kernel_cycles.BUNDLES.items():
        own = others.get(kernel.rpartition("_")[0], "bfloat16")
        one_step = bundles["v5e"] + kernel_cycles.PASS_BUNDLES.get(kernel, {}).get("v5e", 0)
        # A size that was not counted for v5e is scaled from another one.
        assert kernel_cycles.cycles(named(kernel, own), "v5e") == one_step or not one_step, kernel
        if own == "bfloat16":
            assert kernel_cycles.cycles(named(kernel, dtype), "v5e") == 0, kernel


def test_a_kernel_that_writes_a_part_of_an_array_is_read_over_several_lines() -> None:
    """XLA fuses such a kernel with the in-place update, and prints its attributes on several
    lines.
    """
    text = """
%joined (a: f32[9,8,128], q: bf16[8,128]) -> f32[9,8,128] {
  %a = f32[9,8,128]{2,1,0} parameter(0)
  %q = bf16[8,128]{1,0} parameter(1)
  %zero = s32[] constant(0)
  %c = f32[1,8,128]{2,1,0} custom-call(%q), backend_config={"cost_estimate": {
"bytes_accessed":4096,
"flops":99,
"transcendentals":0
}, "needs_layout_passes": true}
  ROOT %u = f32[9,8,128]{2,1,0} dynamic-update-slice(%a, %c, %zero, %zero, %zero)
}

ENTRY %main (a: f32[9,8,128], q: bf16[8,128]) -> f32[9,8,128] {
  %a = f32[9,8,128]{2,1,0} parameter(0)
  %q = bf16[8,128]{1,0} parameter(1)
  ROOT %f = f32[9,8,128]{2,1,0} fusion(%a, %q), kind=kCustom, calls=%joined
}
"""
    found = costs(text).total
    assert found.flops == 99
    # The kernel's operand, and the part that is written.
    assert found.bytes == 2 * 8 * 128 + 4 * 8 * 128


@pytest.mark.parametrize("integer", ["s32", "u32"])
def test_iterations_of_a_loop_are_read_from_its_condition(integer: str) -> None:
    module = compiled.Module(f"""\
%body (p: ({integer}[], f32[4])) -> ({integer}[], f32[4]) {{
  ROOT %p = ({integer}[], f32[4]{{0}}) parameter(0)
}}

%condition (q: ({integer}[], f32[4])) -> pred[] {{
  %q = ({integer}[], f32[4]{{0}}) parameter(0)
  %n = {integer}[]{{:T(128)}} constant(8)
  %i = {integer}[]{{:T(128)}} get-tuple-element(%q), index=0
  ROOT %less = pred[]{{:T(512)}} compare(%i, %n), direction=LT
}}

ENTRY %main (a: ({integer}[], f32[4])) -> ({integer}[], f32[4]) {{
  %a = ({integer}[], f32[4]{{0}}) parameter(0)
  ROOT %loop = ({integer}[], f32[4]{{0}}) while(%a), condition=%condition, body=%body
}}
""")
    assert module.trip_count(module.computations["main"]["loop"]) == 8


def test_collectives_between_slices_are_counted_apart() -> None:
    """A transfer is a send and a receive of the hosts; the larger of the two counts."""

    def transfer(operation: str, shape: str) -> str:
        return (
            f"%{operation} = (f32[{shape}]{{0}}, u32[], token[]) {operation}(%x, %after), "
            'frontend_attributes={_xla_host_transfer_rendezvous="all-gather.1_0",'
            '_xla_megascale_transfer_type="ALL_GATHER"}'
        )

    text = "\n".join(
        [
            "ENTRY %main (x: f32[256]) -> f32[512] {", "%x = f32[256]{0} parameter(0)",
            "%after = token[] after-all()", transfer("send", "256"), transfer("recv", "512"),
            "ROOT %all = f32[512]{0} all-gather(%x), dimensions={0}", "}",
        ]
    )  # fmt: skip
    found = costs(text).collectives
    assert found == {
        "all-gather": CollectiveCost(1, 2048), "all-gather between slices": CollectiveCost(1, 2048),
    }  # fmt: skip
