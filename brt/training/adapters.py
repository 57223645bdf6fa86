"""Low-rank adapters (LoRA, Hu et al. 2021), which are trained instead of the kernels of a model.

An adapter consists of two small matrices, A and B, whose product is added to a kernel. The matrices
for the kernel `stack/window_0/tokens/keys` are the parameters
`adapters/stack/window_0/tokens/keys/a` and `.../b`. The code of models knows nothing of adapters:
`merge_into_kernels` adds the products to the kernels before the parameters are passed to a model.
"""

import zlib

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, PyTree

from brt.config import Adapter, Config
from brt.distributed import rules
from brt.errors import ConfigError
from brt.training import parameter_paths
from brt.training.matrices import Axes, from_matrix, is_kernel, matrix_names, matrix_shape

# The random key of adapters is the run's key with this number folded in (`jax.random.fold_in`).
_KEY = 2
# The tree of parameters contains the matrices A and B of all adapters below this name.
ROOT = "adapters"


def with_new_adapters(params: PyTree, config: Config, key: Array) -> PyTree:
    """Returns the boxed parameters of a model together with the initial values of its adapters.

    The adapter of a kernel [in, out] consists of two matrices: A has the shape [in, rank] and
    normal elements with the variance 1 / in, and B has the shape [rank, out] and is zero. The
    adapters therefore do not change the model at first. Arrays without a box (`nn.Partitioned`) get
    no adapters.
    """
    adapter = config.adapter
    if not adapter.rank:
        return params
    _check(params, config)
    flat, factors = flatten_dict(params, sep="/"), {}
    for path in _adapted(params, adapter):
        names = matrix_names(flat[path].names)
        *layers, rows, columns = matrix_shape(flat[path].names, flat[path].value.shape)
        # The key depends only on the path of the kernel, so that an adapter's initial values do not
        # depend on which other kernels have adapters.
        own_key = jax.random.fold_in(jax.random.fold_in(key, _KEY), zlib.crc32(path.encode()))
        a = jax.random.normal(own_key, (*layers, rows, adapter.rank)) * rows**-0.5
        b = jnp.zeros((*layers, adapter.rank, columns))
        factors[f"{ROOT}/{path}/a"] = nn.LogicallyPartitioned(a, (*names[:-1], "rank"))
        factors[f"{ROOT}/{path}/b"] = nn.LogicallyPartitioned(b, (*names[:-2], "rank", names[-1]))
    return {**params, **unflatten_dict(factors, sep="/")}


def merge_into_kernels(params: PyTree[Array], adapter: Adapter, axes: Axes) -> PyTree[Array]:
    """Adds alpha / rank * A B to each kernel with an adapter; returns the model's parameters."""
    model, factors = split(params)
    flat, factors = flatten_dict(model, sep="/"), flatten_dict(factors, sep="/")
    for path in dict.fromkeys(factor.rpartition("/")[0] for factor in factors):
        a, b = (factors[f"{path}/{name}"] for name in "ab")
        product = from_matrix(axes[path], jnp.matmul(a, b, precision="highest"), flat[path].shape)
        sum_ = flat[path] + adapter.alpha / adapter.rank * product
        flat[path] = rules.constrain(sum_, *axes[path])
    return unflatten_dict(flat, sep="/")


def split(params: PyTree) -> tuple[PyTree, PyTree]:
    """Separates the parameters of the model from those of its adapters ({} without adapters)."""
    model = {name: value for name, value in params.items() if name != ROOT}
    return model, params.get(ROOT, {})


def _check(params: PyTree[nn.Partitioned], config: Config) -> None:
    """Refuses adapters of kernels that do not exist, are trained whole, or have a smaller rank."""
    adapter, trainable = config.adapter, config.training.trainable
    kernels = _kernels(params)
    parameter_paths.check("Adapter.kernels", adapter.kernels, kernels, "kernels of the model")
    adapted = _adapted(params, adapter)
    whole = [path for path in adapted if parameter_paths.matches(path, trainable)]
    if whole:
        raise ConfigError(
            f"Adapter.kernels = {adapter.kernels} and Training.trainable = {trainable} both name "
            f"{whole[0]}; a kernel is trained either whole or by an adapter, so narrow the patterns"
        )
    flat = flatten_dict(params, sep="/")
    for path in adapted:
        rows, columns = matrix_shape(flat[path].names, flat[path].value.shape)[-2:]
        if adapter.rank > min(rows, columns):
            raise ConfigError(
                f"Adapter.rank = {adapter.rank} is above the rank of {path}, which is a matrix of "
                f"{rows} x {columns}; set at most {min(rows, columns)}, or train it whole "
                "(Training.trainable)"
            )


def _adapted(params: PyTree[nn.Partitioned], adapter: Adapter) -> list[str]:
    return [path for path in _kernels(params) if parameter_paths.matches(path, adapter.kernels)]


def _kernels(params: PyTree[nn.Partitioned]) -> list[str]:
    boxes = flatten_dict(params, sep="/").items()
    return [path for path, box in boxes if is_kernel(getattr(box, "names", ()))]
