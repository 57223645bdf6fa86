"""Compiles the kernels alone for TPUs that are not here, and reads the length of their schedules.

python tools/benchmark/kernels.py                  # 512 tokens, heads of 128, four chips: 4 minutes
python tools/benchmark/kernels.py --chips v5e --window 1024 --head_dim 64

The compiler's figures: bundles, one a cycle, of a step of the grid (a head of a lane's block),
without waiting for memory. `brt.planning.schedules` keeps them, for `brt.plan`.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

CHIPS = {"v4": "v4:2x2x1", "v5e": "v5e:1x1", "v5p": "v5p:2x2x1", "v6e": "v6e:1x1"}
NAME = re.compile(r"\b([a-z_]+_(?:\d+x)+\d+)_[a-z]+\d+_\d+_steps")
TOTAL = re.compile(r"total scheduled bundles:\s+(\d+)")


def main() -> None:
    args = parser().parse_args()
    if args.one:
        compile_one(args.one, args.window, args.head_dim, args.dtype)
        return
    known: dict[str, dict[str, int]] = {}
    print("| kernel | chip | bundles | MB of VMEM |\n|---|---|---|---|")
    for chip in args.chips:
        with tempfile.TemporaryDirectory() as place:
            vmem = compiled(chip, Path(place), args)
            for name, bundles in sorted(schedules(Path(place)).items()):
                known.setdefault(name, {})[chip] = bundles
                print(f"| {name} | {chip} | {bundles:,} | {vmem[name] / 1e6:.1f} |", flush=True)
    if args.json:
        print(json.dumps(known))


def compiled(chip: str, place: Path, args: argparse.Namespace) -> dict[str, int]:
    """Bytes of VMEM by kernel; the compiler writes its schedules into a directory."""
    flags = f"--xla_jf_dump_to={place} --xla_jf_dump_llo_text=true"
    sizes = [f"--window={args.window}", f"--head_dim={args.head_dim}", f"--dtype={args.dtype}"]
    done = subprocess.run(
        [sys.executable, __file__, f"--one={chip}", *sizes], capture_output=True, text=True,
        env=os.environ | {"LIBTPU_INIT_ARGS": flags, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{chip}: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def schedules(place: Path) -> dict[str, int]:
    """Bundles by kernel."""
    found = {}
    for path in place.glob("*_steps*schedule-analysis_final_bundles.txt"):
        name, total = NAME.search(path.name), TOTAL.search(path.read_text())
        if name and total:
            found[name[1]] = int(total[1])
    return found


def compile_one(chip: str, window: int, head_dim: int, dtype: str) -> None:
    """Forward and backward: two blocks of tokens and their window, and states that read them."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import SingleDeviceSharding

    from brt.ops import dispatch
    from brt.ops.softmax_attention import attend_to_blocks
    from brt.ops.window_attention import window_part
    from brt.planning import topologies

    device = topologies.named(CHIPS[chip]).devices[0]

    def array(*shape: int, dtype: str = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))

    tokens, heads = 2 * window, 8
    by_token, cached = (array(1, n, heads, head_dim) for n in (tokens, window))
    bias, readable = array(heads, window, dtype="float32"), array(1, 2, dtype="bool")
    scale = array(heads, dtype="float32")

    def gradients(q, cached, k, v, bias, scale, readable, weights):
        def loss(q, k, v, bias, scale):
            part = window_part(
                q, cached, k, v, bias, readable, scale=scale, implementation="pallas_tpu"
            )
            states = attend_to_blocks(
                q[:, :window], k.swapaxes(1, 2), v.swapaxes(1, 2), readable[:, 0],
                null_keys=True, implementation="pallas_tpu",
            )  # fmt: skip
            y = part.output.astype(jnp.float32) + jnp.tile(states, (1, 2, 1, 1))
            return jnp.sum(y * weights.astype(jnp.float32))

        return jax.grad(loss, argnums=(0, 1, 2, 3, 4))(q, k, v, bias, scale)

    with dispatch.use_backend("tpu"):
        lowered = jax.jit(gradients).lower(
            by_token, (cached, cached), by_token, by_token, bias, scale, readable, by_token
        )
    text = lowered.compile().as_text()
    print(json.dumps(vmem_of(text)))


def vmem_of(text: str) -> dict[str, int]:
    """Bytes by kernel, of a compiled module."""
    found = {}
    for line in text.splitlines():
        kernel = NAME.search(line)
        used = re.search(r'"used_scoped_memory_configs":\[\{[^}]*"size":"(\d+)"', line)
        if kernel and used:
            found[kernel[1]] = int(used[1])
    return found


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    chips = {"type": lambda text: text.split(","), "default": list(CHIPS)}
    flags.add_argument("--chips", metavar="NAMES", help=f"default: {','.join(CHIPS)}", **chips)
    flags.add_argument("--window", type=int, default=512)
    flags.add_argument("--head_dim", type=int, default=128)
    flags.add_argument("--dtype", default="bfloat16")
    flags.add_argument("--json", action="store_true", help="one more line, for programs")
    flags.add_argument("--one", choices=CHIPS, help=argparse.SUPPRESS)
    return flags


if __name__ == "__main__":
    main()
