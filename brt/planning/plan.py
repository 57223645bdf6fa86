"""Compiles the train step of a run for a machine, and reports the step's memory and speed.

The machine need not be present, because the step is not executed.
"""

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jaxtyping import PyTree

from brt import jax_versions, tasks
from brt.config import Config
from brt.config import Mesh as MeshConfig
from brt.distributed.mesh import AXES, describe_indivisible_size, format_mesh, slice_of
from brt.errors import ConfigError
from brt.ops import compiler_options, dispatch
from brt.planning.compiled import BETWEEN_SLICES, Costs, InstructionGroup, costs
from brt.planning.topologies import ROOM, Topology
from brt.training import layer_forms
from brt.training import run as runs
from brt.training.run import Shapes

_GIB = 1 << 30
_STEP_TIMES = "roofline", "compiler"  # the times of a whole step
_MOST_LISTED = 100  # The JSON report lists at most this many groups of instructions.


class DoesNotFitError(ConfigError):
    """Raised if the step does not fit into the memory of the chip, according to the compiler."""


class Plan(NamedTuple):
    """Properties of the compiled step; values are per device and step unless stated otherwise."""

    topology: Topology  # the machine that the step was compiled for
    mesh: Mapping[str, int]  # number of devices along each axis
    parameters: int  # bytes of the parameters
    optimizer: int  # bytes of the optimizer's moments
    carry: int  # bytes of the caches and recurrent states that one step hands to the next
    model_state: int  # bytes of the values that are learned without gradients
    temporaries: int  # bytes of intermediate results
    peak: int  # bytes of the train state, the batch and the intermediate results together
    costs: Costs  # operations, bytes and cycles by part of the model
    tokens: int  # tokens or frames, including padding, that all devices together read in a step
    # FLOPs that the model needs for a step on all devices together, without recomputation; None if
    # unknown.
    model_flops: int | None
    seconds: float  # compile time
    # True if options told the compiler to save compile time. Memory and collectives are then
    # accurate to within 1 to 17 %, and the cycles are not meaningful.
    low_effort: bool
    # Options for saving compile time that this compiler does not have.
    dropped: tuple[str, ...] = ()

    @property
    def fits(self) -> bool | None:
        """True if the step fits into the chip's memory, otherwise False; None for unknown chips."""
        chip = self.topology.chip
        return None if chip is None else self.peak <= ROOM * chip.memory

    @property
    def used(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def step_seconds(self) -> dict[str, float]:
        """Lower bounds on the step time in seconds, by name; empty if the chip is unknown.

        - `products`, `memory`, `network` and `slices` are the times of matrix products, of memory
          traffic, and of collectives within and between slices at the chip's peak rates. Pallas
          kernels of GPUs do not state their FLOPs, so `products` is at least the time of the FLOPs
          of the model.
        - `roofline` is the maximum of these four.
        - `compiler` is the time of the estimated cycles, plus `network` and `slices`, less
          `covered_seconds`. It is missing if the cycles are not estimated.
        """
        chip = self.topology.chip
        if chip is None:
            return {}
        total = self.costs.total
        network = slices = 0.0
        for kind, cost in self.costs.collectives.items():
            if kind.endswith(BETWEEN_SLICES):
                slices += _transfers(kind) * cost.bytes
            else:
                network += _transfers(kind) * cost.bytes
        times = {
            "products": max(total.flops, (self.model_flops or 0) / self.used) / chip.flops,
            "memory": total.bytes / chip.bandwidth,
            "network": network / chip.network,
            **({"slices": slices / chip.between_slices} if slices else {}),
        }
        times["roofline"] = max(times.values())
        if total.cycles and not self.low_effort:
            waiting = times["network"] + times.get("slices", 0.0) - self.covered_seconds
            times["compiler"] = total.cycles / chip.clock + waiting
        return times

    @property
    def covered_seconds(self) -> float:
        """Seconds during which collectives run beside other instructions; 0 for unknown chips.

        The collectives are assumed to send their data at the bandwidth of the chip's links.
        """
        chip = self.topology.chip
        if chip is None:
            return 0.0
        covered = 0.0
        for one in self.costs.overlaps:
            transfer = _transfers(one.kind) * one.bytes / chip.network
            covered += one.times * min(transfer, one.cycles / chip.clock)
        return covered


def _transfers(kind: str) -> float:
    """Returns how often a collective sends its data: 2 for an all-reduce, otherwise 1.

    An all-reduce consists of a reduce-scatter and an all-gather.
    """
    return 2.0 if kind.startswith("all-reduce") else 1.0


def plan(config: Config, topology: Topology, *, low_effort: bool = False) -> Plan:
    """Compiles the train step of a config for a machine, and returns the properties of the step.

    ConfigError is raised if the mesh does not fit the machine, sizes depend on data that cannot be
    read, or the compiler rejects the step.
    """
    begin = time.perf_counter()
    with dispatch.use_backend(topology.backend, topology.devices[0]):
        config, shapes, batch, tokens, flops = shaped(config, topology)
        lowered = runs.lowered_step(config, shapes, batch)
        requested = jax_versions.LOW_EFFORT if low_effort else {}
        try:
            preferred = compiler_options.preferred(config.model.model_dim)
            offered = {**preferred, **requested} if topology.backend == "tpu" else {}
            compiled, options = compile_with_known_options(lowered, offered)
        except jax.errors.JaxRuntimeError as error:
            raise _refused(error) from error
    memory: Any = compiled.memory_analysis()
    state = layer_forms.step_shapes(config, shapes.state_shapes, shapes.mesh)
    step_costs = costs(compiled.as_text(), topology.chip.name if topology.chip else "")
    arguments = memory.argument_size_in_bytes
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    temporaries = memory.temp_size_in_bytes
    return Plan(
        topology, dict(shapes.mesh.shape), _bytes(state.params), _bytes(state.optimizer),
        _bytes(state.carry), _bytes(state.model_state), temporaries,
        arguments + outputs + temporaries, step_costs, tokens, flops,
        time.perf_counter() - begin, bool(requested.keys() & options.keys()),
        tuple(sorted(requested.keys() - options.keys())),
    )  # fmt: skip


def compile_with_known_options(
    lowered: Any, options: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Compiles a `jax.stages.Lowered` with the `options` that the installed compiler knows.

    Returns the compiled program and the options with which it was compiled.
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


def shaped(config: Config, topology: Topology) -> tuple[Config, Shapes, Any, int, int | None]:
    """Returns the values that are needed to lower the train step and to report on it.

    The values are the config with all sizes filled in, the shapes of the run, a batch, and the
    numbers of positions and of FLOPs (None if unknown) of a whole step. The data are read only if
    sizes depend on the data.
    """
    task, reader = tasks.from_config(config), None
    batch = task.example_row(config) if task.sizes_are_configured(config) else None
    if batch is None:
        config, _, reader = runs.prepare(config)
        batch = reader.largest()
    shapes = runs.compute_shapes(config, topology.devices)
    # The batch may have only some of the rows of a step. `share` is the number of such batches in a
    # step, so the FLOPs and positions of the batch are multiplied by `share`.
    share = config.training.batch_size // len(jax.tree.leaves(batch)[0])
    flops = task.flops(config, batch)
    positions = reader.positions(batch) if reader else jax.tree.leaves(batch)[0].size
    return config, shapes, batch, share * positions, flops and flops * share


def _refused(error: Exception) -> ConfigError:
    text = " ".join(str(error).split())
    if "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower():
        return DoesNotFitError(
            f"the compiler reports that the step does not fit: {text[:300]}; set Model.remat = "
            "True, raise Training.gradient_accumulation, or shard parameters with Mesh.fsdp"
        )
    return ConfigError(f"the compiler rejects the step: {text[:400]}")


def _bytes(tree: PyTree) -> int:
    """Returns the bytes that the shards of all arrays take on one device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def meshes_of(config: Config, devices: int, slices: int = 1) -> list[MeshConfig]:
    """Returns all possible meshes of a number of devices.

    Each axis of a mesh divides the sizes that it shards, and only the axis `data` crosses slices.
    """
    needs = tasks.from_config(config).sharded_sizes(config)
    sizes = [n for n in range(1, devices + 1) if devices % n == 0]
    meshes = []
    for first_axes in itertools.product(sizes, repeat=len(AXES) - 1):
        last, rest = divmod(devices, math.prod(first_axes))
        shape = dict(zip(AXES, (*first_axes, last), strict=True))
        crosses = shape["data"] % slices
        if last and not rest and not crosses and not describe_indivisible_size(shape, needs):
            meshes.append(MeshConfig(**shape))
    return meshes


def sweep(
    config: Config, topology: Topology, say: Callable[[str], object], *, limit: int = 12
) -> list[Plan]:
    """Compiles the train step for several meshes, and returns the plan of each, the best first.

    Meshes whose step fits into memory come before others, and faster meshes before slower ones. A
    mesh has no plan if the compiler refuses its step for lack of memory. The compiler is told to
    save compile time. At most `limit` meshes are tried, those with few axes first. `say` is called
    with a line of text about each mesh.
    """
    devices = len(topology.devices)
    slices = len({slice_of(device) for device in topology.devices})
    candidates = meshes_of(config, devices, slices)
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
            say(f"{format_mesh({axis: getattr(mesh, axis) for axis in AXES})}: {error}")
            last = error
            continue
        plans.append(tried)
        seconds = tried.step_seconds.get("roofline", 0.0)
        peak = f"{tried.peak / 2**30:.2f} GiB"
        say(f"{format_mesh(tried.mesh)}: {peak}, roofline {1e3 * seconds:.1f} ms")

    if not plans:
        raise last

    def sort_key(plan: Plan) -> tuple[bool, float, int]:
        """Fitting plans come first, then faster ones, then those that need less memory."""
        return plan.fits is False, plan.step_seconds.get("roofline", 0.0), plan.peak

    return sorted(plans, key=sort_key)


def _undivided(config: Config, devices: int) -> ConfigError:
    """Returns the error for a config without a possible mesh; the error suggests a batch size."""
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


def plan_json(plan: Plan) -> dict[str, Any]:
    """Returns all values of a plan as JSON.

    A value is for one device and one step, except the numbers of tokens, which are for all devices.
    """
    chip, times = plan.topology.chip, plan.step_seconds
    total = plan.costs.total
    return {
        "topology": plan.topology.name,
        "devices": len(plan.topology.devices),
        "mesh": dict(plan.mesh),
        "parameter_bytes": plan.parameters,
        "optimizer_bytes": plan.optimizer,
        "carry_bytes": plan.carry,
        "model_state_bytes": plan.model_state,
        "temporary_bytes": plan.temporaries,
        "peak_bytes": plan.peak,
        "chip_bytes": chip.memory if chip else None,
        "fits": plan.fits,
        "flops": total.flops,
        "model_flops": plan.model_flops,
        "memory_bytes": total.bytes,
        "kernels": sum(group.times for group in plan.costs.instructions),
        "cycles": total.cycles if not plan.low_effort else None,
        "cycles_at_peak": plan.costs.cycles_at_peak if not plan.low_effort else None,
        "parts": {name: cost._asdict() for name, cost in plan.costs.parts.items()},
        "kernels_without_cycles": list(plan.costs.unknown),
        "instructions": [_flat(group) for group in plan.costs.instructions[:_MOST_LISTED]],
        "collectives": {kind: cost._asdict() for kind, cost in plan.costs.collectives.items()},
        "covered_network_seconds": plan.covered_seconds,
        "tokens_per_step": plan.tokens,
        "step_seconds": times,
        "tokens_per_second": {name: plan.tokens / s for name, s in times.items() if s},
        "mfu": _utilization(plan),
        "compile_seconds": plan.seconds,
        "low_effort": plan.low_effort,
        "dropped_options": list(plan.dropped),
    }


def _flat(group: InstructionGroup) -> dict[str, Any]:
    values = group._asdict()
    return values | values.pop("cost")._asdict()


def _utilization(plan: Plan) -> dict[str, float]:
    chip = plan.topology.chip
    if chip is None or not plan.model_flops:
        return {}
    ideal = plan.model_flops / (chip.flops * plan.used)
    return {name: ideal / s for name, s in plan.step_seconds.items() if s and name in _STEP_TIMES}


def _devices(plan: Plan) -> str:
    """Describes the devices of the mesh, and says how many devices exist if there are more."""
    existing = len(plan.topology.devices)
    of = "" if plan.used == existing else f" of {existing}"
    devices = "device" if existing == 1 else "devices"
    return f"{plan.used}{of} {devices}" + f" as {format_mesh(plan.mesh)}" * (plan.used > 1)


def _effort(plan: Plan) -> str:
    shown = " at low effort" * plan.low_effort
    return f"{shown} (this compiler has no {', '.join(plan.dropped)})" if plan.dropped else shown


def plan_text(plan: Plan, config: Config) -> str:
    """Returns the report about a plan, as text for people."""
    lines = [
        f"{plan.topology.name}: {_devices(plan)}; compiled in {plan.seconds:.0f} s{_effort(plan)}. "
        "Of one device and step:",
        "",
        *_memory(plan),
        "",
        *_parts(plan),
        "",
        *_collectives(plan),
        "",
        *_pace(plan),
        "",
        verdict(plan, config),
        *_idle(plan),
    ]
    return "\n".join(lines)


def _idle(plan: Plan) -> list[str]:
    idle = len(plan.topology.devices) - plan.used
    if not idle:
        return []
    are = "1 device is" if idle == 1 else f"{idle} devices are"
    return [f"{are} idle; --sweep_mesh compares the meshes that use all devices."]


def _memory(plan: Plan) -> list[str]:
    rows = {
        "parameters": plan.parameters, "optimizer": plan.optimizer, "carry": plan.carry,
        "model state": plan.model_state, "temporaries": plan.temporaries, "peak": plan.peak,
    }  # fmt: skip
    chip = plan.topology.chip
    of = f" of {chip.memory / _GIB:.0f}" if chip else ""
    shown_rows = {name: size for name, size in rows.items() if size or name == "peak"}
    return [
        f"  {name:<14} {size / _GIB:9.3f}{of * (name == 'peak')} GiB"
        for name, size in shown_rows.items()
    ]


def _parts(plan: Plan) -> list[str]:
    cycles = not plan.low_effort and plan.costs.total.cycles > 0
    head = f"  {'part':<16}{'TFLOP':>9}{'GB':>9}" + f"{'Mcycles':>10}{'':>6}" * cycles
    lines = [head]
    rows = sorted(plan.costs.parts.items(), key=lambda row: -row[1].cycles or -row[1].bytes)
    for name, cost in [*rows, ("all", plan.costs.total)]:
        line = f"  {name:<16}{cost.flops / 1e12:9.3f}{cost.bytes / 1e9:9.2f}"
        if cycles:
            share = cost.cycles / plan.costs.total.cycles
            line += f"{cost.cycles / 1e6:10.2f}{share:6.0%}"
        lines.append(line)
    if cycles and (at_peak := plan.costs.cycles_at_peak):
        lines.append(
            f"  {at_peak / 1e6:.2f} Mcycles of these are kernels at the chip's peak rates, which "
            "take longer than their schedules"
        )
    return lines


def _collectives(plan: Plan) -> list[str]:
    if not plan.costs.collectives:
        return ["  no collectives"]
    lines = [
        f"  {kind:<29} {cost.times:5d} times, {cost.bytes / 1e6:10.1f} MB of results"
        for kind, cost in sorted(plan.costs.collectives.items())
    ]
    if beside := sum(one.times for one in plan.costs.overlaps):
        covered = 1e3 * plan.covered_seconds
        lines.append(f"  {beside} of them run beside other operations, for {covered:.2f} ms")
    return lines


def _pace(plan: Plan) -> list[str]:
    times = plan.step_seconds
    if not times:
        return ["  no step time: the peak rates of this device are unknown"]
    meaning = {
        "products": "matrix products at the chip's peak",
        "memory": "bytes at the bandwidth of its memory",
        "network": "collectives at the bandwidth of its links, without overlap",
        "slices": "collectives between slices at the bandwidth of the data centre's network",
        "roofline": "the slowest of these",
        "compiler": "the cycles of all kernels, and the collectives outside them: a lower bound",
    }
    utilization = _utilization(plan)
    lines = []
    for name, seconds in times.items():
        line = f"  {name:<10} {1e3 * seconds:9.2f} ms"
        if name in _STEP_TIMES and seconds:
            line += f"  {plan.tokens / seconds:14,.0f} tokens/s"
            line += f"  MFU {utilization[name]:6.1%}" if name in utilization else ""
        lines.append(f"{line}  {meaning[name]}")
    if "compiler" in times and plan.costs.unknown:
        lines.append(f"  compiler lacks kernels of unknown length: {', '.join(plan.costs.unknown)}")
    return lines


def verdict(plan: Plan, config: Config) -> str:
    """Returns a text that says whether the step fits into memory and, if not, what would help."""
    chip = plan.topology.chip
    if chip is None:
        return "Whether it fits: this device does not say how much memory it has."
    if plan.fits:
        return f"It fits, with {(chip.memory - plan.peak) / _GIB:.1f} GiB to spare."
    ways = [way for applies, way in _remedies(plan, config) if applies]
    return (
        f"It does not fit: {plan.peak / _GIB:.1f} GiB on chips of {chip.memory / _GIB:.0f}. "
        f"What helps: {'; '.join(ways)}."
    )


def _remedies(plan: Plan, config: Config) -> list[tuple[bool, str]]:
    section = getattr(config, tasks.from_config(config).model)
    state = plan.parameters + plan.optimizer
    lanes = config.training.batch_size // config.training.gradient_accumulation
    shared = plan.mesh["data"] * plan.mesh["fsdp"]
    # `segment` is half of the segment length, rounded down to whole blocks. `microbatches` is the
    # smallest number of parts into which a microbatch can be split so that each device has the same
    # number of rows of a part. It is 0 if there is no such number.
    block = getattr(section, "block_length", 0)
    segment = block and config.training.segment_length // block // 2 * block
    microbatches = next(
        (n for n in range(2, lanes + 1) if lanes % n == lanes // n % shared == 0), 0
    )
    free = plan.mesh["data"] > 1 and plan.mesh["fsdp"] == 1
    return [
        (
            hasattr(section, "remat") and not section.remat and plan.temporaries > state,
            f"Model.remat = True, which recomputes what {plan.temporaries / _GIB:.1f} GiB of "
            "temporaries keep",
        ),
        (
            free and state * 2 > plan.temporaries,
            f"Mesh.fsdp = {plan.mesh['data']}, Mesh.data = 1: {state / _GIB:.1f} GiB of "
            "parameters and optimizer are shared",
        ),
        (
            microbatches > 0,
            "Training.gradient_accumulation = "
            f"{microbatches * config.training.gradient_accumulation}",
        ),
        (
            0 < getattr(section, "window", 0) < segment,
            f"Training.segment_length = {segment} in a new run",
        ),
        (True, "more devices"),
    ]


def best_meshes(plans: list[Plan], count: int = 3) -> str:
    """Returns a text about the first `count` plans, with the flags that select their meshes."""
    hasty = any(plan.low_effort for plan in plans)
    note = "; at low effort memory and collectives hold, the schedule does not" * hasty
    lines = [f"The best meshes{note}:"]
    for plan in plans[:count]:
        pace = plan.step_seconds.get("roofline")
        line = f"  {format_mesh(plan.mesh)}: peak {plan.peak / _GIB:.2f} GiB"
        line += "" if plan.fits is None else ", fits" if plan.fits else ", does not fit"
        if pace:
            line += f", roofline {1e3 * pace:.1f} ms, {plan.tokens / pace:,.0f} tokens/s"
        flags = " ".join(f"--gin_bindings='Mesh.{a} = {n}'" for a, n in plan.mesh.items() if n > 1)
        lines += [line, f"    {flags}" if flags else ""]
    return "\n".join(line for line in lines if line)
