"""Compiles the train step of a run for a machine, and says whether it fits and how fast it is."""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jaxtyping import PyTree

from brt import jax_versions, tasks
from brt.config import Config
from brt.config import Mesh as MeshConfig
from brt.distributed.mesh import AXES, misfit
from brt.errors import ConfigError
from brt.ops import dispatch
from brt.planning.costs import Costs, costs
from brt.planning.topologies import ROOM, Topology
from brt.training import run as runs
from brt.training.run import Shapes


class DoesNotFitError(ConfigError):
    """The compiler finds no way to run a step in the memory of the chip."""


class Plan(NamedTuple):
    """What the compiler says of one device and step.

    Attributes:
      mesh: devices along each axis.
      parameters, optimizer, carry, model_state, temporaries, peak: bytes; carry is what lanes take
        from step to step.
      cut: names of parameters, and the part of each that a device has, where that is not all.
      tokens: positions of a step, of all devices.
      model_flops: of a step of all devices, as the model counts them; None: nobody does.
      seconds: to compile.
      low_effort: the compiler took short cuts. Memory and collectives are then as good as
        otherwise to 1-17 %; the schedule, and so cycles, is not.
      dropped: the options of low effort that this compiler does not know.
    """

    topology: Topology
    mesh: Mapping[str, int]
    parameters: int
    optimizer: int
    carry: int
    model_state: int
    temporaries: int
    peak: int
    costs: Costs
    tokens: int
    model_flops: int | None
    seconds: float
    low_effort: bool
    dropped: tuple[str, ...] = ()

    @property
    def fits(self) -> bool | None:
        """None where the chip's memory is not known."""
        chip = self.topology.chip
        return None if chip is None else self.peak <= ROOM * chip.memory

    @property
    def used(self) -> int:
        """The number of devices in the mesh."""
        return math.prod(self.mesh.values())

    @property
    def step_seconds(self) -> dict[str, float]:
        """Of a step, by what would set the pace; {} where nothing is known of the chip.

        `products`, `memory`, `network`: at their peaks; `roofline`: the slowest of the three;
        `compiler`: its cycles, and collectives one after the other behind them.
        """
        chip = self.topology.chip
        if chip is None:
            return {}
        total = self.costs.total
        network = sum(
            _crossings(kind) * moved.bytes for kind, moved in self.costs.collectives.items()
        )
        found = {
            "products": total.flops / chip.flops,
            "memory": total.bytes / chip.bandwidth,
            "network": network / chip.network,
        }
        found["roofline"] = max(found.values())
        if chip.clock and total.cycles and not self.low_effort:
            found["compiler"] = total.cycles / chip.clock + found["network"]
        return found


def _crossings(kind: str) -> float:
    """How often the bytes of a result pass a device's links: a reduction is a scatter and a
    gather."""
    return 2.0 if kind == "all-reduce" else 1.0


def plan(config: Config, topology: Topology, *, low_effort: bool = False) -> Plan:
    """Compiles the step of a config for a machine.

    Raises:
      ConfigError: the mesh does not fit; or sizes that only data would tell; or the compiler
        refuses.
    """
    begin = time.perf_counter()
    with dispatch.use_backend(topology.backend, topology.devices[0]):
        config, shapes, batch, tokens, flops = _shaped(config, topology)
        lowered = runs.lowered_step(config, shapes, batch)
        asked = jax_versions.LOW_EFFORT if low_effort else {}
        try:
            offered = asked if topology.backend == "tpu" else {}
            compiled, options = compiled_with_known(lowered, offered)
        except jax.errors.JaxRuntimeError as error:
            raise _refused(error) from error
    memory: Any = compiled.memory_analysis()
    state = shapes.abstract
    found = costs(compiled.as_text(), topology.chip.name if topology.chip else "")
    arguments = memory.argument_size_in_bytes
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    temporaries = memory.temp_size_in_bytes
    return Plan(
        topology, dict(shapes.mesh.shape), _bytes(state.params), _bytes(state.optimizer),
        _bytes(state.carry), _bytes(state.model_state), temporaries,
        arguments + outputs + temporaries, found, tokens, flops,
        time.perf_counter() - begin, bool(options), tuple(sorted(asked.keys() - options.keys())),
    )  # fmt: skip


def compiled_with_known(lowered: Any, options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A program compiled with those of the options that the compiler knows, and these options.

    Args:
      lowered: a jax.stages.Lowered.
      options: of the compiler, by name.

    Raises:
      jax.errors.JaxRuntimeError: the compiler refuses the program for another reason.
    """
    known = dict(options)
    while True:
        try:
            return lowered.compile(compiler_options=known), known
        except jax.errors.JaxRuntimeError as error:
            name = jax_versions.unknown_option(error, known)
            if name is None:
                raise
            del known[name]


def _shaped(config: Config, topology: Topology) -> tuple[Config, Shapes, Any, int, int | None]:
    """The config with its sizes, shapes, a batch, its positions and FLOPs.

    Data are read where only they tell the sizes.
    """
    task, reader = tasks.from_config(config), None
    batch = task.example_row(config) if task.sizes_are_configured(config) else None
    if batch is None:
        config, _, reader = runs.prepare(config)
        batch = reader.largest()
    shapes = runs.shaped(config, topology.devices)
    share = config.training.batch_size // len(jax.tree.leaves(batch)[0])
    flops = task.flops(config, batch)
    positions = reader.positions(batch) if reader else jax.tree.leaves(batch)[0].size
    return config, shapes, batch, share * positions, flops and flops * share


def _refused(error: Exception) -> ConfigError:
    text = " ".join(str(error).split())
    if "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower():
        return DoesNotFitError(
            f"the step does not fit at all, says the compiler: {text[:300]}; set Model.remat = "
            "True, raise Training.gradient_accumulation, or share parameters by Mesh.fsdp"
        )
    return ConfigError(f"the compiler refuses the step: {text[:400]}")


def _bytes(tree: PyTree) -> int:
    """Of what one device has of arrays."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def meshes_of(config: Config, devices: int) -> list[MeshConfig]:
    """All meshes of so many devices that divide what they are to share."""
    needs = tasks.from_config(config).sharded_sizes(config)
    sizes = [n for n in range(1, devices + 1) if devices % n == 0]
    found = []
    for data in sizes:
        for fsdp in sizes:
            for tensor in sizes:
                sequence, rest = divmod(devices, data * fsdp * tensor)
                if rest or not sequence:
                    continue
                shape = dict(zip(AXES, (data, fsdp, tensor, sequence), strict=True))
                if not misfit(shape, needs):
                    found.append(MeshConfig(**shape))
    return found


def sweep(
    config: Config, topology: Topology, say: Callable[[str], object], *, limit: int = 12
) -> list[Plan]:
    """Plans of the meshes that may do, at low effort, the fastest that fit first.

    Args:
      limit: of meshes that are compiled; those with one or two axes come first.

    Raises:
      ConfigError: no mesh divides all devices, or the step fits with none that was tried.
    """
    devices = len(topology.devices)
    candidates = meshes_of(config, devices)
    if not candidates:
        raise _undivided(config, devices)
    candidates.sort(key=lambda mesh: sum(getattr(mesh, axis) > 1 for axis in AXES))
    if len(candidates) > limit:
        say(f"trying {limit} of {len(candidates)} meshes, those with few axes")
    plans = []
    for mesh in candidates[:limit]:
        try:
            tried = plan(dataclasses.replace(config, mesh=mesh), topology, low_effort=True)
        except DoesNotFitError as error:
            say(f"{shown(dataclasses.asdict(mesh))}: {error}")
            last = error
            continue
        plans.append(tried)
        pace = tried.step_seconds.get("roofline", 0.0)
        say(f"{shown(tried.mesh)}: {tried.peak / 2**30:.2f} GiB, roofline {1e3 * pace:.1f} ms")

    if not plans:
        raise last

    def order(one: Plan) -> tuple[bool, float, int]:
        return one.fits is False, one.step_seconds.get("roofline", 0.0), one.peak

    return sorted(plans, key=order)


def _undivided(config: Config, devices: int) -> ConfigError:
    """What --sweep_mesh says where no mesh takes all devices, with a batch that one would share."""
    training = config.training
    sizes = ", ".join(
        f"{size} {name}"
        for name, (_, size) in tasks.from_config(config).sharded_sizes(config).items()
    )
    all_lanes = devices * training.gradient_accumulation
    batch = -(-training.batch_size // all_lanes) * all_lanes
    return ConfigError(
        f"no mesh divides {devices} devices among {sizes}; with Training.batch_size = {batch} "
        f"Mesh.data = {devices} does"
    )


def shown(mesh: Mapping[str, int]) -> str:
    """A mesh as people write it."""
    return " x ".join(f"{axis} {n}" for axis, n in mesh.items() if n > 1) or "one device"
