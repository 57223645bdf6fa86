"""What a compiler gives for a stack's bare products, read as a whole and block by block.

    python tools/benchmark/block_products.py --topology=v4:2x2x1 --sequences=1

The dense products of the paper's twelve layers, forward and to the gradients of activations,
bfloat16, 4,096 tokens a sequence: of whole segments, and with ten layers as feedback reads them, a
block of 512 after the other. What feedback costs beyond its FLOPs begins here. Nothing runs.
"""

import argparse

import jax
import jax.numpy as jnp
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
    """Products as a layer has them, and no more between them than keeps them apart."""
    read = sum(jnp.split(jnp.tanh(x @ weights["projections"]), 4, axis=-1))
    x = x + read @ weights["output"]
    return x + jax.nn.relu(x @ weights["up"]) @ weights["down"]


def whole(stack: list[dict[str, Array]], x: Float[Array, "B T D"]) -> Float[Array, ""]:
    for weights in stack:
        x = layer(weights, x)
    return jnp.sum(x.astype(jnp.float32))


def by_block(stack: list[dict[str, Array]], x: Float[Array, "B T D"]) -> Float[Array, ""]:
    """Each block begins with what the one before has told."""
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
    args = parser.parse_args()
    platforms.use_cpus()  # accelerators are left to others
    topology = topologies.named(args.topology)
    there = SingleDeviceSharding(topology.devices[0])

    def given(shape: tuple[int, ...]) -> PyTree[jax.ShapeDtypeStruct]:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=there)

    stack = [{name: given(shape) for name, shape in SHAPES.items()} for _ in range(LAYERS)]
    x = given((args.sequences, TOKENS, DIM))
    chip = topology.chip.name if topology.chip else ""
    for function in (whole, by_block):
        compiled = jax.jit(jax.grad(function, argnums=1)).lower(stack, x).compile()
        total = costs(compiled.as_text(), chip).total
        print(
            f"{function.__name__:>9}: {total.cycles / 1e6:6.1f} Mcycles, "
            f"{total.flops / 1e12:.2f} TFLOP, {total.bytes / 1e9:.1f} GB"
        )


if __name__ == "__main__":
    main()
