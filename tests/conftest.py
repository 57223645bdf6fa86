"""Every test runs on eight fake CPU devices, in a cache and with settings of its own."""

import gc
import os
import sys
from pathlib import Path
from runpy import run_path

# Read as a file: what the types are checked of must not be imported yet.
VERSIONS = run_path(str(Path(__file__).parents[1] / "brt/jax_versions.py"))
# Before jax starts; commands that tests run as processes inherit them.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8"
    + " --xla_backend_optimization_level=0"  # tests compile far longer than they compute
    + " --xla_cpu_parallel_codegen_split_count=1"  # parts for threads cost a quarter more in all
)
os.environ["XLA_FLAGS"] = " ".join([os.environ["XLA_FLAGS"], *VERSIONS["quick_compilation"]()])
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
os.environ["MPLBACKEND"] = "Agg"
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"  # nobody reads the compiler's notes
gc.set_threshold(200_000, 50, 100)  # what is traced is garbage all at once
# Rewritten for its assertions and its types, a module is kept: many processes import it.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

from collections import Counter  # noqa: E402
from collections.abc import Callable  # noqa: E402
from fnmatch import fnmatchcase  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
import pytest  # noqa: E402

TESTS = Path(__file__).parent
FIRST = "tests/end_to_end/test_bad_input.py::"
SLOW: dict[str, list[str]] = {}  # patterns of each file
CASES = pytest.StashKey[dict[str, Counter[str]]]()  # of each function, how many are quick or slow
for line in (TESTS / "slow.txt").read_text().splitlines():
    if line and not line.startswith("#"):
        file, _, pattern = line.partition("::")
        SLOW.setdefault(f"tests/{file}", []).append(pattern)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks what slow.txt lists."""
    file, _, name = item.nodeid.partition("::")
    if any(fnmatchcase(name, pattern) for pattern in SLOW.get(file, ())):
        item.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)  # before what is not asked for is left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Counts each function's cases for test_slow.py and tools/list_properties.py.

    The file that trains the commands' run goes first, so that no other worker waits for it.
    """
    items.sort(key=lambda item: not item.nodeid.startswith(FIRST))
    found = config.stash.setdefault(CASES, {})
    for item in items:
        function = item.nodeid.partition("[")[0]
        kind = "slow" if item.get_closest_marker("slow") else "quick"
        found.setdefault(function, Counter())[kind] += 1


@pytest.fixture(scope="session")
def cases(request: pytest.FixtureRequest) -> dict[str, Counter[str]]:
    """How many quick and slow cases each function has that was collected."""
    return request.config.stash[CASES]


@pytest.fixture(autouse=True, scope="session")
def _cache_of_these_tests(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def random_params() -> Callable[..., Any]:
    """(model, seed) -> parameters of a `Decoder`, none of them at a special value.

    Drawn without compiling anything, which `Decoder.init` does for a second or two.
    """
    import flax.linen as nn
    import jax
    import jax.numpy as jnp

    from brt.config import Config, Training
    from brt.training.matrices import matrix_shape
    from brt.training.state import initial_params

    def draw(model: Any, seed: int = 0) -> Any:
        rng = np.random.default_rng(seed)

        def leaf(path: tuple, box: Any) -> jax.Array:
            shape, name = box.value, path[-1].key
            x = rng.normal(size=shape.shape)
            if name.endswith(("norm", "scale")):
                x = 1 + 0.3 * x
            elif name not in ("embedding", "ids", "initial"):
                matrix = matrix_shape(box.names, shape.shape)
                x = x * (0.5 if name.endswith("bias") else matrix[-2] ** -0.5)
            return jnp.asarray(x, shape.dtype)

        config = Config(model=model, training=Training(segment_length=model.window))
        shapes = jax.eval_shape(lambda: initial_params(config))
        boxed = {"is_leaf": lambda leaf: isinstance(leaf, nn.Partitioned)}
        return jax.tree.map_with_path(leaf, shapes, **boxed)

    return draw
