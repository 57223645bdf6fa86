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
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import kernel_cases
from conditions import report
from flags import parser
from jax.sharding import SingleDeviceSharding

from brt.config import Attention, CrossAttention
from brt.layers.attention_kinds import clustered_config
from brt.layers.seq2seq import cross_config
from brt.ops import clustered_attention, cross_attention, dispatch, masked_attention
from brt.ops.dropout import Dropout, DropoutMask
from brt.ops.softmax_attention import attend_to_blocks
from brt.ops.window_attention import local_attention, window_part
from brt.planning import topologies

Case = tuple[Callable[..., Any], Any]

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
    device = topologies.named(args.topology).devices[0]

    def array(*shape: int, dtype: str = args.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))

    with dispatch.use_backend("gpu", device):
        function, inputs = OPERATIONS[args.operation](args, array)
        jax.jit(function).lower(*inputs).compile()


def gradients_of(attend: Callable[..., Any], learned: Any, others: tuple, weights: Any) -> Case:
    """Returns a function that computes the gradients of `learned`, and its arguments: of the sum of
    the output times `weights`, and of all further results of `attend`.
    """

    def gradients(learned: Any, others: tuple, weights: Any) -> Any:
        def loss(learned: Any) -> jax.Array:
            output, *more = attend(learned, *others)
            output = output.astype(jnp.float32) * weights.astype(jnp.float32)
            return jnp.sum(output) + sum(map(jnp.sum, more))

        return jax.grad(loss)(learned)

    return gradients, (learned, others, weights)


def windows(args: argparse.Namespace, array: Callable[..., Any]) -> Case:
    """Returns the case of window attention, for eight heads over two windows of tokens."""
    window, heads, blocks = args.window, 8, 2
    tokens, cached = (array(1, n * window, heads, args.one) for n in (blocks, 1))
    kept = array(heads, window, window, dtype="bool")
    dropout = DropoutMask(kept, 1.25) if args.dropout else None
    places, function = array(1, blocks, dtype="bool"), window_part
    if args.block:
        places = array(1, blocks * window // args.block, dtype="int32")
        function = local_attention

    def attend(learned: Any, cached: Any, places: Any, dropout: Any) -> Any:
        queries, keys, values, bias, scale = learned
        return function(
            queries, cached, keys, values, bias, places, dropout, scale=scale,
            attend_to_self=not args.strictly_past, implementation=args.implementation,
        )  # fmt: skip

    numbers = (array(*shape, dtype="float32") for shape in ((heads, window), (heads,)))
    learned = tokens, tokens, tokens, *numbers
    return gradients_of(attend, learned, ((cached, cached), places, dropout), tokens)


def states(args: argparse.Namespace, array: Callable[..., Any]) -> Case:
    """Returns the case of attention of 512 states, with eight heads, to two blocks of tokens."""

    def attend(learned: Any, readable: Any) -> Any:
        options = {"null_keys": False, "implementation": args.implementation}
        return (attend_to_blocks(*learned, readable, **options),)

    states, tokens = array(1, 512, 8, args.one), array(1, 8, 2 * args.window, args.one)
    return gradients_of(attend, (states, tokens, tokens), (array(1, dtype="bool"),), states)


def masked(args: argparse.Namespace, array: Callable[..., Any]) -> Case:
    """Returns the case of attention of encoders with T5's bias, for two rows of 1,024 tokens and
    eight heads.
    """

    def attend(learned: Any, mask: Any) -> Any:
        dropout = Dropout(jax.random.key(0), 0.1) if args.dropout else None
        options = {"implementation": args.implementation}
        return (masked_attention.attend(*learned, mask, dropout, **options),)

    tokens, bias = array(2, 1024, 8, args.one), array(8, 1024, 1024, dtype="float32")
    mask = array(2, 1, 1024, dtype="bool")
    return gradients_of(attend, (tokens, tokens, tokens, bias), (mask,), tokens)


def clustered(args: argparse.Namespace, array: Callable[..., Any]) -> Case:
    """Returns the case of improved clustered attention with 100 clusters, for two rows of 4,096
    tokens and twelve heads. K-means of the queries is compiled, too.
    """
    config = clustered_config(Attention(kind="improved_clustered", clusters=100))

    def attend(learned: Any, valid: Any) -> Any:
        options = {"scale": 1.0, "implementation": args.implementation}
        key = jax.random.key(0)
        return (clustered_attention.attend(*learned, valid, config, key, **options),)

    tokens, valid = array(2, 4096, 12, args.one), array(2, 4096, dtype="bool")
    return gradients_of(attend, (tokens, tokens, tokens), (valid,), tokens)


def segments(args: argparse.Namespace, array: Callable[..., Any]) -> Case:
    """Returns the case of SRformer's cross-attention of 128 target positions, for two sources of
    1,024 tokens and eight heads.
    """
    config = cross_config(CrossAttention(kind="srformer", segment_size=args.segment))

    def attend(learned: Any, valid: Any) -> Any:
        options = {"implementation": args.implementation}
        return cross_attention.attend(*learned[:3], valid, learned[3], config, **options)[:1]

    queries, keys = array(2, 128, 8, args.one), array(2, 1024, 8, args.one)
    shapes = jax.eval_shape(
        lambda: cross_attention.initial_parameters(jax.random.key(0), config, 8, args.one)
    )
    parameters = jax.tree.map(lambda x: array(*x.shape, dtype=x.dtype.name), shapes)
    others = (array(2, 1024, dtype="bool"),)
    return gradients_of(attend, (queries, keys, keys, parameters), others, queries)


def causal(args: argparse.Namespace, array: Callable[..., Any]) -> Case:
    """Returns the case of causal clustered attention with 64 centroids that keep 16 keys each, for
    two windows of tokens and eight heads.
    """
    args.lanes, args.head_dim = 1, args.one
    return kernel_cases.causal(array, args)


OPERATIONS = {
    "causal_clustered_attention": causal,
    "segmented_attention": segments,
    "clustered_attention": clustered,
    "window_attention": windows,
    "softmax_attention": states,
    "masked_attention": masked,
}


if __name__ == "__main__":
    main()
