"""`--golden_dir=DIR`: arrays of the original code to compare with."""

from pathlib import Path

import pytest

DEFAULT = Path(__file__).parent.parent / "data" / "golden"


def golden_files(config: pytest.Config) -> list[Path]:
    directory = Path(config.getoption("--golden_dir") or DEFAULT)
    return sorted(directory.rglob("*.npz"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests with an argument `<kind>_file` run over the files of that kind."""
    patterns = {
        "layer_file": ("sliding_layer_", "xl_layer_", "recurrent_layer_"),
        "stack_file": ("stack_",),
        "melodi_layer_file": ("melodi_short", "melodi_long"),
        "melodi_stack_file": ("melodi_stack",),
        "dense_layer_file": ("densekv_layer",),
        "dense_stack_file": ("densekv_stack",),
        "optimizer_file": ("opt_adafactor",),
        "schedule_file": ("lr_schedules",),
        "bias_file": ("t5_bias",),
        "knn_file": ("knn_memory",),
        "external_file": ("external_attention",),
        "exact_file": ("full", "exact_topk"),
        "reformer_file": ("reformer_",),
        "hash_file": ("hash_",),
        "kmeans_file": ("kmeans_",),
        "clustered_file": ("clustered_", "iclustered_"),
    }
    for name, prefixes in patterns.items():
        if name in metafunc.fixturenames:
            files = [f for f in golden_files(metafunc.config) if f.name.startswith(prefixes)]
            metafunc.parametrize(name, files, ids=[f.stem for f in files])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--golden_dir", help="directory of the original code's arrays (.npz)")
