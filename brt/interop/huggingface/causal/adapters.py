"""Low-rank adapters of decoders in PEFT's format: adapter_config.json, and the matrices A and B of
each adapted matrix in adapter_model.safetensors.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict

from brt import untrusted
from brt.config import Adapter, Model
from brt.data import originals
from brt.errors import CheckpointError
from brt.interop.huggingface import files
from brt.interop.huggingface.causal import weights
from brt.interop.huggingface.weights import Arrays

CONFIG, FILE = originals.ADAPTER, "adapter_model.safetensors"
_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(.+)\.lora_([AB])\.weight")
_MERGE = (
    "merge the adapter into its base: PeftModel.from_pretrained(BASE, DIR).merge_and_unload()"
    ".save_pretrained(OUT)"
)
_STRUCTURE = {
    "peft_type": str, "r": int, "lora_alpha": int | float, "use_rslora?": bool | None,
    "base_model_name_or_path?": str | None, "init_lora_weights?": bool | str | None,
}  # fmt: skip
# These keys do not change what an adapter computes, or show in the names and shapes of its arrays.
_SILENT = {
    *(name.removesuffix("?") for name in _STRUCTURE), "auto_mapping", "bias", "exclude_modules",
    "inference_mode", "layers_pattern", "layers_to_transform", "lora_dropout", "megatron_core",
    "modules_to_save", "peft_version", "qalora_group_size", "rank_pattern", "revision",
    "runtime_config", "target_modules", "task_type",
}  # fmt: skip
# With other initial values, PEFT also changes the matrices of the base.
_INITIAL = (True, False, None, "gaussian", "eva", "orthogonal")


def base_of(directory: Path) -> Path:
    """Returns the directory of an adapter's base, the model that the adapter is added to. Raises
    CheckpointError if `originals.base_of` finds none.
    """
    name = str(_describe(directory).get("base_model_name_or_path") or "")
    if base := originals.base_of(directory):
        return base
    raise CheckpointError(
        f"{directory} is an adapter (PEFT) without its model, and base_model_name_or_path = "
        f"{name!r} in its {CONFIG} is no directory of a model; write the path of the model there, "
        "or move the adapter's directory into the directory of the model"
    )


def added(arrays: Arrays, directory: Path) -> dict[str, np.ndarray]:
    """Returns the arrays of a base by Hugging Face's names, with the adapter in `directory` added.

    Arrays that the adapter has as a whole (modules_to_save) replace those of the base.
    """
    described = _describe(directory)
    result, factors = dict(arrays), dict[str, dict[str, np.ndarray]]()
    for name, array in _read(directory).items():
        name = name.removeprefix(_PREFIX)
        factor = _FACTOR.fullmatch(name)
        target = f"{factor[1]}.weight" if factor else name
        if target not in arrays:
            raise CheckpointError(
                f"{directory / FILE}: {name} has no place in the model; if the model is the right "
                f"one, {_MERGE}"
            )
        if factor:
            factors.setdefault(target, {})[factor[2]] = np.asarray(array, np.float32)
        elif array.shape != arrays[name].shape:
            raise CheckpointError(
                f"{directory / FILE}: {name} is {array.shape}, not {arrays[name].shape} as in the "
                "model"
            )
        else:
            result[name] = array
    for name, pair in factors.items():
        product, array = _product(name, pair, described), np.asarray(arrays[name], np.float32)
        if product.shape != array.shape:
            raise CheckpointError(
                f"{directory / FILE}: the adapter of {name} is {product.shape}, not {array.shape}"
            )
        result[name] = array + product
    return result


def _product(name: str, pair: Mapping[str, np.ndarray], described: Mapping[str, Any]) -> np.ndarray:
    a, b = (pair.get(factor, np.zeros(0)) for factor in "AB")
    if a.ndim != 2 or b.ndim != 2 or len(a) != b.shape[1]:
        raise CheckpointError(f"{FILE}: the matrices of {name} are {a.shape} and {b.shape}")
    divisor = len(a) ** 0.5 if described.get("use_rslora") else len(a)
    return np.float32(described["lora_alpha"] / divisor) * (b @ a)


def _describe(directory: Path) -> dict[str, Any]:
    # Checks adapter_config.json: no key may ask for what brt does not compute.
    path = directory / CONFIG
    content = files.read_json(path)
    kind = content.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"{path}: peft_type = {kind!r} is not read, only 'LORA'; {_MERGE}")
    try:
        untrusted.check({name: content.get(name) for name in content}, _STRUCTURE)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    initial = content.get("init_lora_weights", True)
    unread = {name: value for name, value in content.items() if name not in _SILENT and value}
    if initial not in _INITIAL:
        unread["init_lora_weights"] = initial
    for name, value in unread.items():
        raise CheckpointError(f"{path}: {name} = {value!r:.60} is not read; {_MERGE}")
    return content


def _read(directory: Path) -> dict[str, np.ndarray]:
    if not (directory / FILE).is_file() and (directory / "adapter_model.bin").is_file():
        raise CheckpointError(
            f"{directory} has adapter_model.bin, a pickle that can run code, and no {FILE}; "
            "PeftModel.from_pretrained(BASE, DIR).save_pretrained(OUT) writes it as safetensors"
        )
    return files.read_file(directory / FILE)


def exported(
    trained: Mapping[str, Any], params: Mapping[str, Any], model: Model
) -> dict[str, np.ndarray]:
    """Returns the arrays of an adapter by PEFT's names.

    Args:
      trained: the factors of brt's adapters by the names of their kernels, and the parameters that
        were trained as a whole.
      params: the parameters of the model, with the adapters added.
    """
    arrays, all_arrays = {}, dict(weights.export_arrays(params, model))
    for path, array in flatten_dict(dict(trained), sep="/").items():
        kernel, _, factor = path.rpartition("/")
        if factor not in ("a", "b"):
            names = weights.their_names(path, model)
            arrays |= {f"{_PREFIX}{name}": all_arrays[name] for name in names}
            continue
        for name, row in zip(weights.their_names(kernel, model), np.asarray(array), strict=True):
            module = name.removesuffix(".weight")
            arrays[f"{_PREFIX}{module}.lora_{factor.upper()}.weight"] = np.ascontiguousarray(row.T)
    return arrays


def config(adapter: Adapter, arrays: Arrays, base: str) -> dict[str, Any]:
    """Returns the content of adapter_config.json for the arrays that `exported` returns. `base` is
    the directory of the trained model in Hugging Face's format, or "".
    """
    names = [name.removeprefix(_PREFIX) for name in arrays]
    factors = [match[1] for name in names if (match := _FACTOR.fullmatch(name))]
    whole = {name.rpartition(".")[0] for name in names if not _FACTOR.fullmatch(name)}
    alpha = adapter.alpha
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base or None,
        "r": adapter.rank, "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0, "bias": "none", "inference_mode": True,
        "target_modules": sorted(set(factors)), "modules_to_save": sorted(whole) or None,
    }  # fmt: skip
