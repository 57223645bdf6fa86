import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import pytest
from model_settings import with_settings

from brt import jax_versions
from brt.config import Config, Mesh, Model, Training
from brt.distributed.mesh import shape_of
from brt.errors import ConfigError
from brt.layers.sections import Recurrence
from brt.plan import main, parser
from brt.planning import plan, topologies
from brt.planning.compiled import CollectiveCost, Cost, Costs
from brt.planning.plan import Plan, best_meshes, plan_json, plan_text, verdict
from brt.planning.topologies import CHIPS, Topology

GIB = 1 << 30
CONFIG = Config(
    model=Model(layers=2, model_dim=16, heads=4, head_dim=4, mlp_dim=32, window=8,
    vocab_size=64, kinds=(Recurrence(layers=(1,), states=8),)),
    training=Training(batch_size=8, segment_length=32, loss_chunk=8),
)  # fmt: skip


def made(peak: float = 20.0, **changes: object) -> Plan:
    """Returns an invented plan for a v4 chip."""
    topology = Topology("v4:2x2x1", [None] * 4, "tpu", CHIPS["v4"], False)
    found = Costs(
        {"attention": Cost(2.75e12, 1.2e9, 1.05e6), "loss": Cost(0, 1.2e9, 1.05e6)},
        {"all-reduce": CollectiveCost(3, 300_000_000)},
    )
    base = Plan(
        topology, {"data": 4, "fsdp": 1, "tensor": 1, "sequence": 1}, 8 * GIB, 8 * GIB, 0, 0,
        int((peak - 16) * GIB), int(peak * GIB), found, 4096, int(8e12), 1.0, False,
    )  # fmt: skip
    return base._replace(**changes)


def test_paces_are_those_of_the_chip() -> None:
    paces = made().step_seconds
    assert paces["products"] == pytest.approx(2.75 / 275)
    assert paces["memory"] == pytest.approx(2.4 / 1200)
    assert paces["network"] == pytest.approx(2 * 300 / 300_000), "reduced, and told to all"
    assert paces["roofline"] == paces["products"]
    assert paces["compiler"] == pytest.approx(0.002 + paces["network"])
    assert "compiler" not in made(low_effort=True).step_seconds


def test_a_step_computes_at_least_the_products_of_the_model() -> None:
    """GPU kernels do not report their operations, so the model's products are the lower bound.
    Without this bound, a plan could exceed the peak of the chip.
    """
    silent = made(costs=made().costs._replace(parts={"loss": Cost(1e9, 1e6)}))
    assert silent.step_seconds["products"] == pytest.approx(8 / 4 / 275)
    assert plan_json(silent)["mfu"]["roofline"] <= 1
    assert plan_json(made())["mfu"].keys() == {"roofline", "compiler"}, "times of whole steps"


def test_a_plan_says_which_of_its_cycles_are_kernels_at_the_peak() -> None:
    plan = made(costs=made().costs._replace(cycles_at_peak=5e5))
    assert "0.50 Mcycles of these are kernels at the chip's peak" in plan_text(plan, CONFIG)
    assert plan_json(plan)["cycles_at_peak"] == 5e5
    assert "at the chip's peak rates" not in plan_text(made(), CONFIG)


def test_kernels_whose_cycles_nobody_knows_are_named() -> None:
    """If they were not named, a plan would seem faster, the less is known about its kernels."""
    plan = made(costs=made().costs._replace(unknown=("kmeans_8x8_float32",)))
    assert "compiler lacks kernels of unknown length: kmeans_8x8_float32" in plan_text(plan, CONFIG)
    assert plan_json(plan)["kernels_without_cycles"] == ["kmeans_8x8_float32"]
    assert "unknown length" not in plan_text(made(), CONFIG)
    assert "unknown length" not in plan_text(plan._replace(low_effort=True), CONFIG)


def test_a_verdict_names_what_would_make_it_fit() -> None:
    assert verdict(made(), CONFIG) == "It fits, with 12.0 GiB to spare."
    refused = verdict(made(60.0), CONFIG)
    assert refused.startswith("It does not fit: 60.0 GiB on chips of 32. What helps: Model.remat")
    assert "gradient_accumulation = 2" in refused and "segment_length = 16" in refused
    assert "Mesh.fsdp = 4" in verdict(made(34.0), CONFIG)
    almost = made(31.0)
    assert not almost.fits and verdict(almost, CONFIG).startswith("It does not fit: 31.0 GiB")


def test_idle_devices_are_counted() -> None:
    assert "v4:2x2x1: 4 devices as data 4; compiled" in plan_text(made(), CONFIG)
    for mesh, taken, idle in (
        ({"data": 1}, "1 of 4 devices;", "3 devices are idle; --sweep_mesh"),
        ({"fsdp": 3}, "3 of 4 devices as fsdp 3;", "1 device is idle; --sweep_mesh"),
    ):
        text = plan_text(
            made(mesh={"data": 1, "fsdp": 1, "tensor": 1, "sequence": 1} | mesh), CONFIG
        )
        assert f"v4:2x2x1: {taken}" in text and text.splitlines()[-1].startswith(idle)
    assert "idle" not in plan_text(made(), CONFIG)


ALONE = dataclasses.replace(
    CONFIG,
    model=with_settings(CONFIG.model, {"vocab_size": 256, "layers": 1, "Recurrence.layers": ()}),
)


@pytest.fixture(scope="module")
def one() -> Plan:
    """Returns the plan of a step of a layer on one device."""
    return plan.plan(ALONE, topologies.present(), low_effort=True)


def test_a_plan_counts_what_each_device_has(one: Plan) -> None:
    """With fsdp = 4 a device holds a fourth of each sharded matrix and all of the vectors."""
    config = dataclasses.replace(ALONE, mesh=Mesh(data=2, fsdp=4))
    shared = plan.plan(config, topologies.present())
    assert one.parameters / 4 < shared.parameters < one.parameters / 3
    assert shared.mesh == {"data": 2, "fsdp": 4, "tensor": 1, "sequence": 1}
    assert shared.carry == one.carry / 8 and shared.tokens == one.tokens == 8 * 32
    assert not one.costs.collectives and shared.costs.collectives["all-gather"].times
    text = plan_text(shared, config)
    assert "8 devices as data 2 x fsdp 4" in text and "all-gather" in text
    json.dumps(plan_json(shared))


def test_meshes_divide_devices_and_what_they_share() -> None:
    found = plan.meshes_of(CONFIG, 8)
    assert Mesh(data=8) in found and Mesh(data=2, tensor=4) in found
    assert Mesh(tensor=8) not in found, "there are four heads"
    assert Mesh(sequence=8) not in found, "there are four blocks"
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(("batch", "accumulation"), [(3, 1), (8, 1), (20, 2)])
def test_a_sweep_without_a_mesh_names_a_batch_that_has_one(batch: int, accumulation: int) -> None:
    training = dataclasses.replace(
        CONFIG.training, batch_size=batch, gradient_accumulation=accumulation
    )
    machine = made().topology._replace(devices=[None] * 7)
    with pytest.raises(ConfigError, match=r"no mesh divides 7 devices among \d+ lanes") as refused:
        plan.sweep(dataclasses.replace(CONFIG, training=training), machine, print)
    named = int(re.findall(r"Training.batch_size = (\d+)", str(refused.value))[0])
    assert batch <= named < batch + 7 * accumulation
    training = dataclasses.replace(training, batch_size=named)
    assert Mesh(data=7) in plan.meshes_of(dataclasses.replace(CONFIG, training=training), 7)


def test_a_sweep_goes_on_after_a_mesh_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first mesh, whose devices hold all parameters, does not fit for any larger model."""
    said: list[str] = []

    def tried(config: Config, topology: Topology, **options: object) -> Plan:
        if config.mesh.fsdp < smallest:
            raise plan.DoesNotFitError("the step does not fit at all")
        return made(mesh=shape_of(config.mesh, 4))

    monkeypatch.setattr(plan, "plan", tried)
    smallest = 2
    found = plan.sweep(CONFIG, made().topology, said.append)
    assert found and all(one.mesh["fsdp"] >= 2 for one in found)
    assert "data 4: the step does not fit at all" in said
    smallest = 8
    with pytest.raises(ConfigError, match="does not fit at all"):
        plan.sweep(CONFIG, made().topology, said.append)


@pytest.mark.parametrize("name", ["v5e", "v7:2x2", "h100", "h100x0", "cpu"])
def test_a_machine_that_does_not_exist_is_refused_with_those_that_do(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"--topology={name} is not known; there are TPU slices"):
        topologies.named(name)


@pytest.mark.parametrize(("name", "extra"), [("v5e:4x4", "tpu"), ("h100x8", "gpu")])
def test_a_compiler_that_is_not_installed_is_named(
    name: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=rf"pip install 'brt\[{extra}-compile\]'"):
        topologies.named(name)


class Lowered(NamedTuple):
    """A stand-in for a lowered program, whose compiler knows only these options."""

    known: tuple[str, ...]

    def compile(self, compiler_options: dict[str, float]) -> str:
        for name in compiler_options:
            if name not in self.known:
                raise jax.errors.JaxRuntimeError(f"No such compile option: '{name}'")
        return "compiled"


def test_options_that_a_compiler_does_not_know_are_dropped_one_by_one_and_said() -> None:
    names = tuple(jax_versions.LOW_EFFORT)
    for known in (names, names[:1], names[1:], ()):
        compiled, used = plan.compile_with_known_options(Lowered(known), jax_versions.LOW_EFFORT)
        assert (compiled, tuple(used)) == ("compiled", known)
    other = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")
    assert jax_versions.unknown_option(other, jax_versions.LOW_EFFORT) is None
    schedule = "the schedule does not"
    assert schedule in best_meshes([made(low_effort=True)])
    assert schedule not in best_meshes([made()])
    planned = made(low_effort=True, dropped=("memory_fitting_effort",))
    said = "at low effort (this compiler has no memory_fitting_effort)"
    assert said in plan_text(planned, CONFIG)
    assert plan_json(planned)["dropped_options"] == ["memory_fitting_effort"]


def test_cpus_and_gpus_have_no_low_effort_and_the_plan_says_so(one: Plan) -> None:
    assert not one.low_effort and set(one.dropped) == set(jax_versions.LOW_EFFORT)


def test_a_vocabulary_that_only_the_tokenizer_tells_is_planned_for() -> None:
    """As in the file of the quickstart, the byte tokenizer determines the size of the
    vocabulary.
    """
    model = with_settings(ALONE.model, {"vocab_size": 0})
    silent = dataclasses.replace(ALONE, model=model)
    found, expected = (plan.shaped(config, topologies.present()) for config in (silent, ALONE))
    assert found[0].model.vocab_size == 256
    sizes, wanted = (
        jax.tree.map(lambda x: x.shape, shapes.state_shapes) for _, shapes, *_ in (found, expected)
    )
    assert sizes == wanted


def test_flags_that_clash_are_refused() -> None:
    for flags, message in (
        (["--topology=v5e:4x4", "--devices=8"], "name two machines; use one"),
        (["--devices=0"], "--devices=0 must be above 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            main(parser().parse_args(flags))


@pytest.mark.slow
def test_the_papers_model_is_planned_for_a_slice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("libtpu", reason="needs brt[tpu-compile]")
    # The suite sets XLA_FLAGS to flags that a newer libtpu may not know.
    monkeypatch.delenv("XLA_FLAGS")
    flags = [
        "--gin_file=configs/base/paper.gin", "--gin_file=configs/models/rec_fixed_skip.gin",
        "--gin_bindings=Model.vocab_size = 32000", "--gin_bindings=Mesh.data = -1",
        "--topology=v4:2x4x4", "--effort=low", f"--json={tmp_path / 'plan.json'}",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "brt.plan", *flags], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["devices"] == 32 and found["fits"] and found["cycles"] is None
    assert found["parameter_bytes"] == pytest.approx(4 * 193.2e6, rel=0.01)
    assert 4.5e12 < found["flops"] < 6.5e12
