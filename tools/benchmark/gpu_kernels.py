"""Compiles attention's kernels for a GPU, and prints the resources that they occupy.

python tools/benchmark/gpu_kernels.py                         # heads of 64, 128 and 256 on an H100
python tools/benchmark/gpu_kernels.py --window 4096 --head_dims 64 --dropout
python tools/benchmark/gpu_kernels.py --window 2048 --block 256    # a window that is not a block
python tools/benchmark/gpu_kernels.py --operation softmax_attention     # of recurrent states
python tools/benchmark/gpu_kernels.py --operation masked_attention --head_dims 64,128  # of encoders
python tools/benchmark/gpu_kernels.py --operation clustered_attention
python tools/benchmark/gpu_kernels.py --operation causal_clustered_attention
python tools/benchmark/gpu_kernels.py --operation segmented_attention

No GPU is needed. For each kernel, the table has the compiler's figures: registers of a thread,
bytes of registers that are spilled to memory, warps and shared memory of a program, and the number
of programs that fit on a multiprocessor. No times are measured.
"""

import argparse
import functools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conditions import report
from flags import parser

KERNELS = re.compile(r"\.entry (attention_\w+?)(?:_mosaic_gpu_kernel)?\(")
THREADS = re.compile(r"\.maxntid (\d+)")
SHARED_BYTES = re.compile(r"dynamic_shared_memory_size %c(\d+)_i32")
# Registers and bytes of shared memory of a multiprocessor, and the bytes of shared memory that the
# GPU reserves for each program.
REGISTERS, SHARED, RESERVED = 65536, 233472, 1024


def main() -> None:
    flags = parser(
        __doc__, topology="h100x1", implementation="pallas_gpu", window=512,
        block=(0, "default: a window"), segment=(64, "tokens of a segment of a source"),
        head_dims=[64, 128, 256], dtype="bfloat16", dropout=False, strictly_past=False,
    )  # fmt: skip
    flags.add_argument("--operation", choices=sorted(OPERATIONS), default="window_attention")
    flags.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = flags.parse_args()
    if args.one:
        compile_one(args)
        return
    found = {}
    print(
        "| kernel | head | registers | spilled | warps | shared KB | programs |\n"
        + "|---" * 7
        + "|"
    )
    for head_dim in args.head_dims:
        for kernel, used in compiled(head_dim).items():
            found[f"{kernel}_{head_dim}"] = used
            shown = used["registers"], used["spilled"], used["warps"], used["shared"] // 1024
            print(f"| {kernel} | {head_dim} |", *(f"{x} |" for x in (*shown, used["programs"])))
    vars(args).pop("one")
    report(args, found, devices=f"none, compiled for {args.topology}")


def compiled(head_dim: int) -> dict[str, dict[str, int]]:
    """Compiles the kernels for a head size in a new process; returns their figures by kernel.

    The process is new because the directory for the dumps is read only when it starts.
    """
    with tempfile.TemporaryDirectory() as place:
        asked = {"MOSAIC_GPU_DUMP_TO": place, "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], f"--one={head_dim}"], text=True,
            capture_output=True, env=os.environ | asked,
        )  # fmt: skip
        if done.returncode:
            sys.exit(done.stderr.strip().splitlines()[-1])
        return read(Path(place))


def read(place: Path) -> dict[str, dict[str, int]]:
    """Reads the figures of each kernel from the files that the compiler wrote into a directory.

    If a kernel is compiled several times for other sizes, a number is appended to its name.
    """
    found: dict[str, dict[str, int]] = {}
    for path in sorted(place.glob("*.ptx")):
        text = path.read_text()
        if not (name := KERNELS.search(text)):
            continue
        # Mosaic GPU runs its own assembler, which writes a log, and dumps its passes.
        said = path.with_suffix(".ptxas").read_text()
        passes = path.with_suffix(".mlir-passes.log").read_text()
        registers = int(re.findall(r"Used (\d+) reg", said)[0])
        threads, shared = int(THREADS.findall(text)[0]), int(SHARED_BYTES.findall(passes)[0])
        same = sum(known.split(":")[0] == name[1] for known in found)
        found[f"{name[1]}:{same + 1}" if same else name[1]] = {
            "registers": registers, "spilled": int(re.findall(r"(\d+) bytes spill", said)[0]),
            "warps": threads // 32, "shared": shared,
            "programs": min(REGISTERS // (registers * threads), SHARED // (shared + RESERVED)),
            "wgmma": text.count("wgmma.mma_async"), "tma": text.count("cp.async.bulk.tensor"),
            "atomics": len(re.findall(r"\b(?:red|atom)\.", text)),
        }  # fmt: skip
    return found


def compile_one(args: argparse.Namespace) -> None:
    """Compiles the forward and backward pass of an operation for a GPU."""
    import jax
    from jax.sharding import SingleDeviceSharding

    from brt.ops import dispatch
    from brt.planning import topologies

    device = topologies.named(args.topology).devices[0]

    def array(*shape: int, dtype: str = args.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))

    with dispatch.use_backend("gpu", device):
        function, inputs = OPERATIONS[args.operation](args, array)
        jax.jit(function).lower(*inputs).compile()


def window_gradients(args: argparse.Namespace, array: Callable[..., Any]) -> tuple[Callable, Any]:
    """Returns a function that computes the gradients of window attention, for eight heads over two
    windows of tokens, and the shapes of its inputs.
    """
    import jax
    import jax.numpy as jnp

    from brt.ops.dropout import DropoutMask
    from brt.ops.window_attention import local_attention, window_part

    window, heads, blocks = args.window, 8, 2
    tokens, cached = (array(1, n * window, heads, args.one) for n in (blocks, 1))
    dropout = (
        DropoutMask(array(heads, window, window, dtype="bool"), 1.25) if args.dropout else None
    )

    options = {
        "attend_to_self": not args.strictly_past, "implementation": args.implementation,
    }  # fmt: skip
    places = array(1, blocks, dtype="bool")
    attend = functools.partial(window_part, **options)
    if args.block:
        places = array(1, blocks * window // args.block, dtype="int32")
        attend = functools.partial(local_attention, **options)

    def gradients(learned: Any, places: Any, dropout: Any, weights: Any) -> Any:
        def loss(learned: Any) -> jax.Array:
            part = attend(*learned, places, dropout)
            output = part.output.astype(jnp.float32) * weights.astype(jnp.float32)
            return jnp.sum(output) + jnp.sum(part.lse)

        return jax.grad(loss)(learned)

    learned = tokens, (cached, cached), tokens, tokens, array(heads, window, dtype="float32")
    return gradients, (learned, places, dropout, tokens)


def softmax_gradients(args: argparse.Namespace, array: Callable[..., Any]) -> tuple[Callable, Any]:
    """Returns a function that computes the gradients of the attention of 512 states and eight heads
    to the tokens of two blocks, and the shapes of its inputs.
    """
    import jax
    import jax.numpy as jnp

    from brt.ops.softmax_attention import attend_to_blocks

    def gradients(states: Any, tokens: Any, values: Any, readable: Any, weights: Any) -> Any:
        def loss(states: Any, tokens: Any, values: Any) -> jax.Array:
            output = attend_to_blocks(
                states, tokens, values, readable,
                null_keys=False, implementation=args.implementation,
            )  # fmt: skip
            return jnp.sum(output.astype(jnp.float32) * weights.astype(jnp.float32))

        return jax.grad(loss, argnums=(0, 1, 2))(states, tokens, values)

    states, tokens = array(1, 512, 8, args.one), array(1, 8, 2 * args.window, args.one)
    return gradients, (states, tokens, tokens, array(1, dtype="bool"), states)


def masked_gradients(args: argparse.Namespace, array: Callable[..., Any]) -> tuple[Callable, Any]:
    """Returns a function that computes the gradients of the attention of encoders with T5's bias,
    for two rows of 1,024 tokens and eight heads, and the shapes of its inputs.
    """
    import jax
    import jax.numpy as jnp

    from brt.ops.dropout import Dropout
    from brt.ops.masked_attention import attend

    def gradients(learned: Any, mask: Any, weights: Any) -> Any:
        def loss(learned: Any) -> jax.Array:
            dropout = Dropout(jax.random.key(0), 0.1) if args.dropout else None
            output = attend(*learned, mask, dropout, implementation=args.implementation)
            return jnp.sum(output.astype(jnp.float32) * weights.astype(jnp.float32))

        return jax.grad(loss)(learned)

    tokens, bias = array(2, 1024, 8, args.one), array(8, 1024, 1024, dtype="float32")
    return gradients, ((tokens, tokens, tokens, bias), array(2, 1, 1024, dtype="bool"), tokens)


def clustered_gradients(
    args: argparse.Namespace, array: Callable[..., Any]
) -> tuple[Callable, Any]:
    """Returns a function that computes the gradients of improved clustered attention with 100
    clusters, for two rows of 4,096 tokens and twelve heads, and the shapes of its inputs. K-means
    of the queries is compiled, too.
    """
    import jax
    import jax.numpy as jnp

    from brt.config import Attention
    from brt.layers.attention_kinds import clustered_config
    from brt.ops.clustered_attention import attend

    config = clustered_config(Attention(kind="improved_clustered", clusters=100))

    def gradients(learned: Any, valid: Any, weights: Any) -> Any:
        def loss(learned: Any) -> jax.Array:
            output = attend(
                *learned, valid, config, jax.random.key(0), scale=1.0,
                implementation=args.implementation,             )  # fmt: skip
            return jnp.sum(output.astype(jnp.float32) * weights.astype(jnp.float32))

        return jax.grad(loss)(learned)

    tokens, valid = array(2, 4096, 12, args.one), array(2, 4096, dtype="bool")
    return gradients, ((tokens, tokens, tokens), valid, tokens)


def segmented_gradients(
    args: argparse.Namespace, array: Callable[..., Any]
) -> tuple[Callable, Any]:
    """Returns a function that computes the gradients of SRformer's cross-attention of 128 target
    positions, for two sources of 1,024 tokens and eight heads, and the shapes of its inputs.
    """
    import jax
    import jax.numpy as jnp

    from brt.config import CrossAttention
    from brt.layers.seq2seq import cross_config
    from brt.ops import segmented_recurrent_attention as segmented

    config, size = cross_config(CrossAttention(kind="srformer")), args.segment

    def gradients(learned: Any, mask: Any, counts: Any, weights: Any) -> Any:
        def loss(learned: Any) -> jax.Array:
            queries, keys, values, parameters = learned
            windows = segmented.SegmentWindows(keys, values, mask, counts)
            output, _ = segmented.attend(
                queries, windows, parameters, config, implementation=args.implementation
            )
            return jnp.sum(output.astype(jnp.float32) * weights.astype(jnp.float32))

        return jax.grad(loss)(learned)

    queries, keys = array(2, 128, 8, args.one), array(1024 // size, 2, 8, size, args.one)
    kernel, bias = (array(*(args.one,) * n, dtype="float32") for n in (2, 1))
    parameters = segmented.RecurrenceParameters(
        kernel, array(dtype="float32"), array(dtype="float32"), bias
    )
    mask, counts = array(1024 // size, 2, size, dtype="bool"), array(2, dtype="int32")
    return gradients, ((queries, keys, keys, parameters), mask, counts, queries)


def causal_gradients(args: argparse.Namespace, array: Callable[..., Any]) -> tuple[Callable, Any]:
    """Returns a function that computes the gradients of causal clustered attention with 64
    centroids that keep 16 keys each, for two windows of tokens and eight heads, and the shapes of
    its inputs.
    """
    from kernel_cases import causal

    args.lanes, args.head_dim = 1, args.one
    return causal(array, args)


OPERATIONS = {
    "causal_clustered_attention": causal_gradients,
    "segmented_attention": segmented_gradients,
    "clustered_attention": clustered_gradients,
    "window_attention": window_gradients,
    "softmax_attention": softmax_gradients,
    "masked_attention": masked_gradients,
}


if __name__ == "__main__":
    main()
