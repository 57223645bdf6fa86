"""Settings of all tests: eight fake CPU devices, fast compilation, type checks, and a cache.

The cache directory is a temporary one, not that of the user.
"""

import gc
import os
import sys
from pathlib import Path
from runpy import run_path

# This module is run as a file, because brt must not be imported before its type checks are
# installed.
VERSIONS = run_path(str(Path(__file__).parents[1] / "brt/jax_versions.py"))
# These variables must be set before jax is imported. Processes that tests start inherit them.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8"
    + " --xla_backend_optimization_level=0"  # Tests take far longer to compile than to compute.
    + " --xla_cpu_parallel_codegen_split_count=1"  # Splitting takes a quarter more processor time.
)
os.environ["XLA_FLAGS"] = " ".join([os.environ["XLA_FLAGS"], *VERSIONS["quick_compilation"]()])
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
os.environ["MPLBACKEND"] = "Agg"
# Compiled programs need no source locations, because no test reads them.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
# The objects that tracing creates become garbage at the same time, so collect garbage rarely.
gc.set_threshold(200_000, 50, 100)
# Store the bytecode of modules, which is rewritten for assertions and type checks, because many
# processes import the same modules.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

from collections.abc import Callable  # noqa: E402
from fnmatch import fnmatchcase  # noqa: E402
from typing import Any  # noqa: E402

import lazy_checks  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

lazy_checks.install()  # must be called before brt is imported

FIRST = "tests/end_to_end/test_bad_input.py::"


@pytest.hookimpl(tryfirst=True)  # This hook must run before pytest deselects the slow tests.
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the slow cases and puts the file first that trains the run of the commands.

    `@pytest.mark.slow_cases("pattern", ...)` marks the cases of a function, or of a whole file, as
    slow whose id in brackets matches one of the patterns (see `fnmatch`). Other workers wait for
    the run of the commands, so its file goes first.

    Raises:
      pytest.UsageError: a pattern matches no case, and all cases were collected. With --golden_dir,
        the cases are those of other recordings.
    """
    items.sort(key=lambda item: not item.nodeid.startswith(FIRST))
    unused: dict[tuple[str, str], bool] = {}
    for item in items:
        case = item.callspec.id if hasattr(item, "callspec") else ""
        for node, mark in item.iter_markers_with_node("slow_cases"):
            for pattern in mark.args:
                matches = fnmatchcase(case, pattern)
                key = (node.nodeid.partition("[")[0], pattern)
                unused[key] = unused.get(key, True) and not matches
                if matches:
                    item.add_marker(pytest.mark.slow)
    selected = any("::" in argument for argument in config.args)
    selected = selected or bool(config.getoption("golden_dir", None))
    wrong = [f"{node}: {pattern!r}" for (node, pattern), alone in unused.items() if alone]
    if wrong and not selected:
        raise pytest.UsageError(f"slow_cases that match no case: {', '.join(wrong)}")


def pytest_sessionfinish() -> None:
    """Spares a worker the collections at its end, whose findings pytest-xdist does not report."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _cache_of_these_tests(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def random_params() -> Callable[..., Any]:
    """Returns a function that draws random parameters of a `Decoder` for a `Model` and a seed.

    No parameter has a special value such as 0 or 1, so that tests notice if one is not used. Unlike
    `Decoder.init`, which compiles for one or two seconds, the function compiles nothing.
    """
    import flax.linen as nn
    import jax
    import jax.numpy as jnp

    from brt.config import Config, Training
    from brt.training.matrices import matrix_shape
    from brt.training.state import parameter_shapes

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
        boxed = {"is_leaf": lambda leaf: isinstance(leaf, nn.Partitioned)}
        return jax.tree.map_with_path(leaf, parameter_shapes(config), **boxed)

    return draw
