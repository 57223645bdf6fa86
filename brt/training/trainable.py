"""The parameters that training changes (Training.trainable); all other parameters are frozen.

Frozen parameters have no gradients and no optimizer state, and no step changes them.

Patterns such as "*/cell/*" choose parameters by their paths, as in the module `fnmatch`. The path
of a parameter consists of the names that lead to it in the tree of parameters, joined by "/".

Low-rank adapters (LoRA, Hu et al. 2021) are trained instead of the kernels of a model. An adapter
consists of two small matrices, A and B, whose product is added to a kernel. The matrices for the
kernel `stack/window_0/tokens/keys` are the parameters `adapters/stack/window_0/tokens/keys/a` and
`.../b`. The code of models knows nothing of adapters: `merge_into_kernels` adds the products to the
kernels before the parameters are passed to a model.
"""

import zlib
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, PyTree

from brt.config import Adapter, Config
from brt.config.checks import nearest
from brt.distributed import rules
from brt.errors import ConfigError
from brt.training.matrices import Axes, from_matrix, is_kernel, matrix_names, matrix_shape

_SHOWN = 6  # An error lists at most this number of parameters.


def matches(path: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def check_patterns(
    setting: str, patterns: Sequence[str], paths: Collection[str], kind: str
) -> None:
    """Raises ConfigError if a pattern matches none of `paths`, which the message calls `kind`."""
    for pattern in patterns:
        if any(matches(path, [pattern]) for path in paths):
            continue
        shown = _near(pattern.replace("*", "").strip("/"), paths) or list(paths)
        listed = ", ".join(shown[:_SHOWN]) + (", ..." if len(shown) > _SHOWN else "")
        raise ConfigError(
            f"{setting} has {pattern!r}, which matches none of the {len(paths)} {kind}; there are "
            f"{listed} (without {setting}, brt.train --dry_run lists all)"
        )


def _near(name: str, paths: Collection[str]) -> list[str]:
    """Returns the paths to suggest in place of `name`.

    A part of a path is one or several adjacent names. The function finds the part that is most
    similar to `name`, and returns all paths that contain this part. If no part is similar, it
    returns the paths that contain the string `name`.
    """
    parts: dict[str, list[str]] = {}
    for path in paths:
        names = path.split("/")
        for start in range(len(names)):
            for end in range(start + 1, len(names) + 1):
                parts.setdefault("/".join(names[start:end]), []).append(path)
    near = nearest(name, parts)
    return parts[near] if near else [path for path in paths if name and name in path]


# The random key of adapters is the run's key with this number folded in (`jax.random.fold_in`).
_KEY = 2
# In the tree of parameters, the matrices A and B of all adapters are below this name.
ADAPTERS = "adapters"


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
    _check_adapter(params, config)
    flat, factors = flatten_dict(params, sep="/"), {}
    for path in _adapted(params, adapter):
        names = matrix_names(flat[path].names)
        *layers, rows, columns = matrix_shape(flat[path].names, flat[path].value.shape)
        # The key depends only on the path of the kernel, so that an adapter's initial values do not
        # depend on which other kernels have adapters.
        own_key = jax.random.fold_in(jax.random.fold_in(key, _KEY), zlib.crc32(path.encode()))
        a = jax.random.normal(own_key, (*layers, rows, adapter.rank)) * rows**-0.5
        b = jnp.zeros((*layers, adapter.rank, columns))
        factors[f"{ADAPTERS}/{path}/a"] = nn.LogicallyPartitioned(a, (*names[:-1], "rank"))
        factors[f"{ADAPTERS}/{path}/b"] = nn.LogicallyPartitioned(
            b, (*names[:-2], "rank", names[-1])
        )
    return {**params, **unflatten_dict(factors, sep="/")}


def merge_into_kernels(params: PyTree[Array], adapter: Adapter, axes: Axes) -> PyTree[Array]:
    """Returns the model's parameters, with alpha / rank * A B added to kernels with adapters."""
    model, factors = split_adapters(params)
    flat, factors = flatten_dict(model, sep="/"), flatten_dict(factors, sep="/")
    for path in dict.fromkeys(factor.rpartition("/")[0] for factor in factors):
        a, b = (factors[f"{path}/{name}"] for name in "ab")
        product = from_matrix(axes[path], jnp.matmul(a, b, precision="highest"), flat[path].shape)
        sum_ = flat[path] + adapter.alpha / adapter.rank * product
        flat[path] = rules.constrain(sum_, *axes[path])
    return unflatten_dict(flat, sep="/")


def split_adapters(params: PyTree) -> tuple[PyTree, PyTree]:
    """Separates the parameters of the model from those of its adapters ({} without adapters)."""
    model = {name: value for name, value in params.items() if name != ADAPTERS}
    return model, params.get(ADAPTERS, {})


def _check_adapter(params: PyTree[nn.Partitioned], config: Config) -> None:
    """Raises ConfigError if Adapter.kernels and Adapter.rank do not suit the model.

    Every pattern in Adapter.kernels must match kernels, and Training.trainable must not match the
    same kernels. The rank must not exceed the number of rows or columns of these kernels.
    """
    adapter, trainable = config.adapter, config.training.trainable
    kernels = _kernels(params)
    check_patterns("Adapter.kernels", adapter.kernels, kernels, "kernels of the model")
    adapted = _adapted(params, adapter)
    whole = [path for path in adapted if matches(path, trainable)]
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
    return [path for path in _kernels(params) if matches(path, adapter.kernels)]


def _kernels(params: PyTree[nn.Partitioned]) -> list[str]:
    boxes = flatten_dict(params, sep="/").items()
    return [path for path, box in boxes if is_kernel(getattr(box, "names", ()))]


def patterns(config: Config) -> tuple[str, ...]:
    """Returns patterns of the paths of trained parameters; () if all are trained.

    If the model has adapters, these and the parameters of Training.trainable are trained.
    """
    own = config.training.trainable
    return (*own, f"{ADAPTERS}/*") if config.adapter.rank else own


def split(params: PyTree, patterns: Sequence[str]) -> tuple[PyTree, PyTree]:
    """Separates the trained parameters, which match `patterns`, from the frozen ones."""
    if not patterns:
        return params, {}
    trained, frozen = {}, {}
    for path, leaf in flatten_dict(params, sep="/").items():
        (trained if matches(path, patterns) else frozen)[path] = leaf
    return unflatten_dict(trained, sep="/"), unflatten_dict(frozen, sep="/")


def merge(trained: PyTree, frozen: PyTree) -> PyTree:
    if not frozen:
        return trained
    flat = flatten_dict(trained, sep="/") | flatten_dict(frozen, sep="/")
    return unflatten_dict(flat, sep="/")
