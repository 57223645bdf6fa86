"""Compares the costs of a stack's products over whole segments and over one block at a time.

    python tools/benchmark/block_products.py --topology=v4:2x2x1 --sequences=1

The program consists of the dense products of the paper's twelve layers in bfloat16 with 4,096
tokens per sequence: the forward pass and the gradients of the activations. It is compiled twice:
with products over whole segments, and with ten layers that are applied to one block of 512 tokens
after the other, as a model with feedback does. The costs that the compiler estimates show how much
slower feedback is with the same FLOPs, before anything else of the model is added. Nothing is run.
"""

import argparse

import jax
import jax.numpy as jnp
from conditions import report
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, Float, PyTree

from brt import platforms
from brt.planning import topologies
from brt.planning.costs import costs

LAYERS, READ_BY_BLOCK, TOKENS, BLOCK, DIM, MLP = 12, 10, 4096, 512, 1024, 4096
SHAPES = {
    "projections": (DIM, 4 * DIM),
    "output": (DIM, DIM),
    "up": (DIM, MLP),
    "down": (MLP, DIM),
}


def layer(weights: dict[str, Array], x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Computes the products of a layer, with only as many operations between them as are needed to
    keep the compiler from merging them.
    """
    read = sum(jnp.split(jnp.tanh(x @ weights["projections"]), 4, axis=-1))
    x = x + read @ weights["output"]
    return x + jax.nn.relu(x @ weights["up"]) @ weights["down"]


def whole(stack: list[dict[str, Array]], x: Float[Array, "B T D"]) -> Float[Array, ""]:
    for weights in stack:
        x = layer(weights, x)
    return jnp.sum(x.astype(jnp.float32))


def by_block(stack: list[dict[str, Array]], x: Float[Array, "B T D"]) -> Float[Array, ""]:
    """Applies the first ten layers block by block and the others to the whole segment.

    The output of a block is added to the input of the next one, so that the blocks must be
    computed one after the other.
    """
    told, blocks = jnp.zeros_like(x[:, :BLOCK]), []
    for block in jnp.split(x, x.shape[1] // BLOCK, axis=1):
        told += block
        for weights in stack[:READ_BY_BLOCK]:
            told = layer(weights, told)
        blocks.append(told)
    return whole(stack[READ_BY_BLOCK:], jnp.concatenate(blocks, axis=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--topology", default="v4:2x2x1", help="as brt.plan takes it")
    parser.add_argument("--sequences", type=int, default=1, help="on one device")
    parser.add_argument("--json", metavar="FILE", help="also write the costs and their conditions")
    args = parser.parse_args()
    platforms.use_cpus()  # Nothing runs here, so other processes can use the accelerators.
    topology = topologies.named(args.topology)
    there = SingleDeviceSharding(topology.devices[0])

    def given(shape: tuple[int, ...]) -> PyTree[jax.ShapeDtypeStruct]:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=there)

    stack = [{name: given(shape) for name, shape in SHAPES.items()} for _ in range(LAYERS)]
    x = given((args.sequences, TOKENS, DIM))
    chip = topology.chip.name if topology.chip else ""
    found = {}
    for function in (whole, by_block):
        compiled = jax.jit(jax.grad(function, argnums=1)).lower(stack, x).compile()
        total = costs(compiled.as_text(), chip).total
        found[function.__name__] = {
            "cycles": total.cycles, "flops": total.flops, "bytes": total.bytes
        }  # fmt: skip
        print(
            f"{function.__name__:>9}: {total.cycles / 1e6:6.1f} Mcycles, "
            f"{total.flops / 1e12:.2f} TFLOP, {total.bytes / 1e9:.1f} GB"
        )
    report(args, found, devices=f"none, compiled for {args.topology}")


if __name__ == "__main__":
    main()
