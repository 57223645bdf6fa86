"""Tests the options of XLA's compiler: an unknown option does not stop a command."""

from types import SimpleNamespace

import jax
import pytest

from brt.ops import compiler_options, dispatch


def on_cpus(options: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Returns the compiler options for CPUs if the preferred options were `options`."""
    monkeypatch.setattr(compiler_options, "_CPU_OPTIONS", options)
    return dict(compiler_options.options.__wrapped__(8))


def test_an_option_that_this_jaxlib_does_not_know_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unknown, known = {"xla_cpu_no_such_option": ""}, {"xla_cpu_enable_fast_math": "False"}
    assert on_cpus(unknown, monkeypatch) == {}
    assert on_cpus(known, monkeypatch) == known
    assert on_cpus({**unknown, **known}, monkeypatch) == known


def test_what_the_user_says_in_xla_flags_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, level = {"xla_cpu_enable_fast_math": "False"}, {"xla_backend_optimization_level": "2"}
    monkeypatch.setenv("XLA_FLAGS", "--xla_other=1 --xla_backend_optimization_level=0")
    assert on_cpus({**fast, **level}, monkeypatch) == fast
    monkeypatch.delenv("XLA_FLAGS")
    assert on_cpus({**fast, **level}, monkeypatch) == {**fast, **level}


@pytest.mark.parametrize(("backend", "kind"), [("gpu", "NVIDIA H100"), ("tpu", "TPU v6 lite")])
def test_other_backends_have_no_options(backend: str, kind: str) -> None:
    with dispatch.use_backend(backend, SimpleNamespace(device_kind=kind)):
        assert compiler_options.preferred(1024) == {}


def test_a_tpu_gets_memory_for_the_tiles_of_wide_models_unless_the_user_has_set_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "xla_tpu_scoped_vmem_limit_kib"
    with dispatch.use_backend("tpu", SimpleNamespace(device_kind="TPU v5 lite")):
        assert compiler_options.preferred(1024) == {name: "40960"}
        assert compiler_options.preferred(1023) == {}
        monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--xla_other=1 --{name}=16384")
        assert compiler_options.preferred(1024) == {}


def test_a_v4_gathers_parameters_while_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "xla_enable_async_all_gather"
    with dispatch.use_backend("tpu", SimpleNamespace(device_kind="TPU v4")):
        assert compiler_options.preferred(1024) == compiler_options.preferred(8) == {name: "true"}
        monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--{name}=false")
        assert compiler_options.preferred(8) == {}


def test_evaluation_has_the_options_of_the_train_step_on_cpus_only() -> None:
    assert compiler_options.of_inference() == compiler_options.options(0)
    with dispatch.use_backend("tpu", SimpleNamespace(device_kind="TPU v4")):
        assert compiler_options.of_inference() == {}


def test_options_are_what_jax_takes_and_nobody_changes_them() -> None:
    options = compiler_options.options(8)
    assert jax.jit(lambda: 7).lower().compile(options)() == 7
    with pytest.raises(TypeError):
        options["xla_cpu_enable_fast_math"] = "true"
