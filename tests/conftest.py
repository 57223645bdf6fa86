"""Every test runs on eight fake CPU devices, in a cache and with settings of its own."""

import os

# Before jax starts; commands that tests run as processes inherit them.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8"
    + " --xla_backend_optimization_level=0"  # tests compile far longer than they compute
)
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
os.environ["MPLBACKEND"] = "Agg"

import pytest  # noqa: E402


@pytest.fixture(autouse=True, scope="session")
def _cache_of_these_tests(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
