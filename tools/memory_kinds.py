"""Writes the parameters, carried bytes and FLOPs of the models of a sweep over memories to a file,
of which tools/tables.py writes a table.

The figures are computed from shapes; no model is created or run.

python tools/memory_kinds.py [--gin_file=configs/sweeps/memory.gin]
    [--json=docs/results/memory_kinds.json]
"""

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import NamedTuple

import flax.linen as nn
import jax

from brt import command_line, sweep
from brt.config import Config
from brt.models.decoder import forward_flops_per_token, new_state
from brt.sweeping import points
from brt.training.state import initial_params, parameter_counts

BYTES = 259  # Size of the vocabulary for bytes: the byte values and the special ids.


class Row(NamedTuple):
    """The name and the config of a sweep's point. The config has a vocabulary size."""

    name: str
    config: Config

    @property
    def parameters(self) -> int:
        """Number of parameters of the model."""
        return parameter_counts(nn.meta.unbox(jax.eval_shape(lambda: initial_params(self.config))))[
            0
        ]

    @property
    def carried(self) -> int:
        """Size in bytes of one lane's state, which is carried from segment to segment."""
        shapes = jax.eval_shape(lambda: new_state(self.config.model, 1))
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(shapes))

    @property
    def flops(self) -> int:
        """FLOPs of the forward pass per token."""
        return forward_flops_per_token(self.config.model)

    def figures(self) -> dict[str, str | int]:
        """Returns the row as JSON."""
        sizes = {"parameters": self.parameters, "carried": self.carried, "flops": self.flops}
        return {"model": self.name, **sizes}


def rows(gin_file: str) -> list[Row]:
    """Returns the points of the sweep in a .gin file, with models in float32."""
    args = sweep.parser().parse_args([f"--gin_file={gin_file}"])
    bound, resolve = command_line.section_and_variant_resolver(args, "Sweep")
    found = []
    for point in points.expand(points.from_bindings(bound), resolve):
        model = dataclasses.replace(
            point.config.model, vocab_size=point.config.model.vocab_size or BYTES, dtype="float32"
        )
        found.append(Row(point.name, dataclasses.replace(point.config, model=model)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gin_file", default="configs/sweeps/memory.gin")
    parser.add_argument("--json", type=Path, default=Path("docs/results/memory_kinds.json"))
    args = parser.parse_args()
    found = [row.figures() for row in rows(args.gin_file)]
    args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
