"""Settings of earlier versions, which .gin files and saved configs may still name."""

_RECURRENCE = {
    "recurrent_layers": "layers",
    **{name: name for name in ("states", "id_init", "gate", "gate_layout", "gate_bias",
                               "gate_horizon", "gate_tanh")},
}  # fmt: skip
_COMPRESSIVE = {
    "compressive_layers": "layers", "compressed_memory": "slots", "compression_rate": "rate",
    "compression": "compressor", "compression_loss": "loss", "compression_weight": "loss_weight",
}  # fmt: skip
_SUMMARIES = {
    "summary_layers": "layers", "long_summary_layers": "long_layers",
    **{name: name for name in ("summaries", "short_memory", "long_memory", "long_increment")},
}  # fmt: skip
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
