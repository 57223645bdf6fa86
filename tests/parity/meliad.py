"""Converts parameters and caches of the original code (google-research/meliad, generation A)."""

import re
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from model_settings import PARITY, with_settings

from brt.config import Model
from brt.config.model import SelfAttention
from brt.errors import DataError
from brt.layers.recurrent import RecurrentState
from brt.layers.runs import runs
from brt.layers.sections import Recurrence
from brt.layers.state import LayerState, WindowState

Arrays = Mapping[str, np.ndarray]

_TOKENS = {
    "norm": "tbase/_kvq/pre_attn_layernorm/scale",
    "queries": "tbase/_kvq/queries_layer/kernel",
    "keys": "tbase/_kvq/keys_layer/kernel",
    "values": "tbase/_kvq/values_layer/kernel",
    "scale": "tbase/_kvq/attention_scale",
    "cross_queries": "tbase/_kvq/queries2_layer/kernel",
    "cross_scale": "tbase/attention_scale2",
    "relative_bias": "relative_positions/rel_embedding",
    "alibi_scale": "relative_positions/_wrapped_module/scale",
    "alibi_bound": "relative_positions/_wrapped_module/bound",
    "output": "tbase/post_attn_mlp/output_layer/kernel",
    "mlp_norm": "tbase/pre_ffn_layernorm/scale",
    "mlp_in": "tbase/ffn/hidden0/kernel",
    "mlp_out": "tbase/ffn/output_layer/kernel",
}
# A cell has most of these arrays, too.
_CELL = {
    "initial": "recurrent_initial_state",
    "ids": "recurrent_tbase/_kvq/position_embeddings",
    **{
        ours: f"recurrent_{theirs}"
        for ours, theirs in _TOKENS.items()
        if theirs.startswith("tbase")
    },
}
_GATE = {
    "bias": ("gate_bias", "gate_layer/bias"),
    "kernel": ("gate_layer/kernel",),
    "forget_bias": ("forget_gate/bias",),
    "forget_kernel": ("forget_gate/kernel",),
    "input_bias": ("input_gate/bias",),
    "input_kernel": ("input_gate/kernel",),
}
for _ours, _theirs in (("output_gate", "post_attn_mlp"), ("mlp_gate", "ffn")):
    for _part, _names in _GATE.items():
        for _name in _names:
            _CELL[f"{_ours}_{_part}|{_name}"] = f"recurrent_tbase/{_theirs}/{_name}"


def layer_parameters(arrays: Arrays, model: Model) -> dict[str, dict[str, np.ndarray]]:
    """Returns one layer's parameters with the names and shapes of `TransformerBlock` and
    `StateCell`.

    Raises:
      DataError: an array has a name that is not known.
    """
    tables = {"tokens": _TOKENS, "cell": _CELL}
    named = {
        theirs: (part, ours.split("|")[0])
        for part, table in tables.items()
        for ours, theirs in table.items()
    }
    result: dict[str, dict[str, np.ndarray]] = {}
    for name, value in arrays.items():
        if name not in named:
            raise DataError(f"meliad parameter {name!r} has no counterpart in brt")
        part, ours = named[name]
        result.setdefault(part, {})[ours] = _by_head(part, ours, value, model)
    return result


def _by_head(part: str, name: str, value: np.ndarray, model: Model) -> np.ndarray:
    """Splits the axis of heads: [D, HK] -> [D, H, K] and [nHK, D] -> [n, H, K, D].

    Other arrays are returned as they are.
    """
    heads = (model.heads, model.head_dim)
    if name in ("queries", "keys", "values", "cross_queries"):
        return value.reshape(len(value), *heads)
    single = (part, name, model.of(Recurrence).gate_layout) == ("cell", "mlp_in", "single")
    if single or name == "output" or (name.startswith("output_gate") and "kernel" in name):
        return value.reshape(-1, *heads, value.shape[1])
    return value


def _subtree(arrays: Arrays, prefix: str) -> dict[str, np.ndarray]:
    """Returns the arrays whose names begin with the prefix, by the rest of their names."""
    return {k[len(prefix) :]: v for k, v in arrays.items() if k.startswith(prefix)}


def _stacked(layers: list[dict[str, dict[str, np.ndarray]]]) -> dict[str, dict[str, Array]]:
    """Returns parameters of several layers, stacked along a new first axis."""
    return {
        part: {name: jnp.stack([layer[part][name] for layer in layers]) for name in layers[0][part]}
        for part in layers[0]
    }


def decoder_parameters(arrays: Arrays, model: Model) -> dict[str, object]:
    """Returns the parameters of a whole stack as a tree for `Decoder`."""
    stack, first = {}, 0
    for name, _, count, _ in runs(model):
        layers = [
            layer_parameters(_subtree(arrays, f"transformer{first + i}/"), model)
            for i in range(count)
        ]
        stack[name] = _stacked(layers)
        first += count
    return {
        "embedding": jnp.asarray(arrays["embed/embedding"]),
        "norm": jnp.asarray(arrays["final_layernorm/scale"]),
        "stack": stack,
    }


def layer_state(arrays: Arrays, valid: np.ndarray) -> LayerState:
    """Returns the state of one layer from the caches that the original code uses in training."""
    window = WindowState(
        jnp.asarray(arrays["previous_keys_train"]),
        jnp.asarray(arrays["previous_values_train"]),
        jnp.asarray(valid),
    )
    if "recurrent_state_train" not in arrays:
        return window
    return RecurrentState(window, jnp.asarray(arrays["recurrent_state_train"]), window.valid)


def model_of(arrays: Arrays, *, window: int, rotary: bool = False) -> Model:
    """Returns the `parity` model that has these parameters, from which sizes and kinds are read.

    Args:
      window: the number of tokens of the window.
      rotary: True if keys are rotated, which the parameters do not show.

    Raises:
      DataError: the positions are of a kind that has no counterpart.
    """
    layers = sorted({int(m[1]) for k in arrays if (m := re.match(r"transformer(\d+)/", k))})
    prefixes = [f"transformer{i}/" for i in layers] or [""]
    parts = [_subtree(arrays, prefix) for prefix in prefixes]
    recurrent = [i for i, part in enumerate(parts) if "recurrent_initial_state" in part]
    first = parts[0]
    heads = _any_of(first, "tbase/_kvq/attention_scale", _TOKENS["relative_bias"]).shape[0]
    model_dim, width = first["tbase/_kvq/keys_layer/kernel"].shape
    sizes = {
        "layers": len(parts),
        "model_dim": model_dim,
        "heads": heads,
        "head_dim": width // heads,
        "mlp_dim": first["tbase/ffn/hidden0/kernel"].shape[1],
        "window": window,
        "positions": "rotary" if rotary else _positions_of(first),
        "feedback": any(
            "tbase/_kvq/queries2_layer/kernel" in part
            for i, part in enumerate(parts)
            if i not in recurrent
        ),
        "attention": SelfAttention(normalize_qk="tbase/_kvq/attention_scale" in first),
        "vocab_size": arrays["embed/embedding"].shape[0] if "embed/embedding" in arrays else 1,
        "dtype": "float32",
    }
    gates = _gates_of(parts[recurrent[0]]) if recurrent else {}
    kinds = (Recurrence(layers=tuple(recurrent), **gates),) if recurrent else ()
    # The original code multiplies the angles of rotary positions by pi.
    angles = {"Rotary.divisors": (1 / np.pi,)} if rotary else {}
    return with_settings(Model(**sizes, kinds=kinds), PARITY | angles)


def _any_of(arrays: Arrays, *names: str) -> np.ndarray:
    return next(arrays[name] for name in names if name in arrays)


def _positions_of(part: Arrays) -> str:
    names = [name for name in part if name.startswith("relative_positions/")]
    if not names:
        return "none"
    if _TOKENS["relative_bias"] in names:
        return "t5"
    if _TOKENS["alibi_bound"] in names:
        return "alibi"
    raise DataError(f"meliad positions with {names} have no counterpart in brt")


def _gates_of(part: Arrays) -> dict[str, Any]:
    """Returns the settings of a recurrent layer, which the names of its parameters determine."""
    cell = _subtree(part, "recurrent_tbase/")
    projects, has_mlp = "post_attn_mlp/output_layer/kernel" in cell, "ffn/hidden0/kernel" in cell
    layout = "skip" if not has_mlp else "dual" if projects else "single"
    gated = _subtree(cell, "post_attn_mlp/" if projects else "ffn/")
    gate = "fixed" if "gate_bias" in gated else "gru" if "gate_layer/bias" in gated else "lstm"
    states = part["recurrent_initial_state"].shape[0]
    return {"gate": gate, "gate_layout": layout, "states": states}
