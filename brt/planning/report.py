"""Reports of a plan, as text for people and as JSON."""

from typing import Any

from brt import tasks
from brt.config import Config
from brt.planning.compiled import InstructionGroup
from brt.planning.plan import Plan, format_mesh

_GIB = 1 << 30
_STEP_TIMES = "roofline", "compiler"  # the times of a whole step
_MOST_LISTED = 100  # The JSON report lists at most this many groups of instructions.


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
    """Describes the devices of the mesh, and the number of existing devices if it is larger."""
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
        f"  {kind:<20} {cost.times:5d} times, {cost.bytes / 1e6:10.1f} MB of results"
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
        "roofline": "the slowest of these",
        "compiler": "the compiler's cycles, and the collectives outside them: a lower bound",
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
    """Says whether the step fits into memory, or which settings would make it fit."""
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
    # A segment consists of whole blocks, and a microbatch of equal shares of the devices.
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
    """Returns a text about the first of some plans, with the flags that select their meshes."""
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
