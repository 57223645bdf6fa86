"""Settings of earlier versions, which .gin files and saved configs may still name."""


def _kept(*names: str) -> dict[str, str]:
    """Returns the names of settings that moved to another section without another change."""
    return {name: name for name in names}


_RECURRENCE = {
    "recurrent_layers": "layers",
    **_kept("states", "id_init", "gate", "gate_layout", "gate_bias", "gate_horizon", "gate_tanh"),
}
_COMPRESSIVE = {
    "compressive_layers": "layers", "compressed_memory": "slots", "compression_rate": "rate",
    "compression": "compressor", "compression_loss": "loss", "compression_weight": "loss_weight",
}  # fmt: skip
_SUMMARIES = {
    "summary_layers": "layers",
    "long_summary_layers": "long_layers",
    **_kept("summaries", "short_memory", "long_memory", "long_increment"),
}
_WINDOW = {
    "layer_windows": "by_layer",
    **_kept("block", "sinks", "cache", "mask_empty_cache", "attend_to_self"),
}
_ATTENTION = {
    "attention_bias": "bias",
    **_kept("kv_heads", "normalize_qk", "scale_init", "query_scale", "bias_before_scale"),
}
_ROUTING = ("layers", "heads", "clusters", "keep", "decay", "commitment")
_MOVED = {
    "Recurrence": _RECURRENCE,
    "Memorizing": {
        "memorizing_layers": "layers", "memory_neighbors": "neighbors", "memory_search": "search",
    },
    "DenseMemory": {"dense_memory_layers": "layers"},
    "Clustered": {
        "clustered_layers": "layers", "clusters": "clusters", "cluster_top_k": "top_k",
        "cluster_jensen": "jensen",
    },
    "Compressive": _COMPRESSIVE,
    "Summaries": _SUMMARIES,
    "Routing": {f"routing_{name}": name for name in _ROUTING},
    "Window": _WINDOW,
    "SelfAttention": _ATTENTION,
    "MLP": {"gated_mlp": "gated", "mlp_bias": "bias"},
    "Embedding": {"scale_embedding": "scaled", "tied_output": "tied", **_kept("logit_scale")},
}  # fmt: skip

# The keys are names of earlier settings, and the values are their present names. If several kinds
# of layers shared an earlier setting, each of the kinds has a setting of its own now.
RENAMED: dict[str, tuple[str, ...]] = {
    "Model.memory_size": ("Memorizing.size", "DenseMemory.size"),
    **{
        f"Model.{old}": (f"{section}.{new}",)
        for section, names in _MOVED.items()
        for old, new in names.items()
    },
}
