"""Settings that the sections of several tasks have in common.

A run has one section for the model and one for the data, which its task determines (`Seq2Seq` and
`Pairs` for summarisation). A field that several of these sections have is one setting:
`Model.dropout` is the dropout of the model that the run has, and `Data.train` names the training
data of its task. `Decoding.beams` is the number of beams of every task that searches with beams.
The sections declare these fields alike, but the defaults in the sections may differ.
"""

from collections.abc import Iterator

# The sections that each task reads, in addition to those that all tasks read. brt's own tasks are
# listed here and not in `brt.tasks`, so that settings are resolved without importing the tasks.
TASK_SECTIONS: dict[str, tuple[str, ...]] = {
    "language_modeling": ("Model", "Data", "Sampling", "Decoding", "Distillation"),
    "masked_language_modeling": ("Encoder", "Attention", "Data"),
    "summarization": (
        "Seq2Seq", "Attention", "CrossAttention", "Pairs", "Decoding", "Sampling",
    ),
    "speech_recognition": ("Encoder", "Attention", "Speech"),
    "text_classification": ("Encoder", "Attention", "Sentences"),
    "text_regression": ("Encoder", "Attention", "Sentences"),
    "extractive_qa": ("Encoder", "Attention", "Questions"),
}  # fmt: skip
# The keys are sections of .gin files. The values are the fields that .gin files set in this section
# for every task, although the section of the run's task may have another name: `Data.train` sets
# `Pairs.train` in a run of summarisation.
SHARED: dict[str, frozenset[str]] = {
    "Model": frozenset((
        "layers", "model_dim", "heads", "head_dim", "mlp_dim", "vocab_size", "positions",
        "max_positions", "relative_buckets", "relative_max_distance", "activation",
        "dropout", "attention_dropout", "dtype", "remat",
    )),
    "Data": frozenset((
        "train", "validation", "test", "tokenizer", "max_length", "buckets", "errors", "columns",
        "cache_dir",
    )),
    "Decoding": frozenset(("beams",)),
}  # fmt: skip
# The keys are the sections of `SHARED`. The values are the sections that take their place in runs
# of some tasks and have the same fields: a run of summarisation has `Pairs` instead of `Data`.
_OTHERS = {
    "Decoding": ("Speech",),
    "Model": ("Seq2Seq", "Encoder"),
    "Data": ("Pairs", "Speech", "Sentences", "Questions"),
}


def public_name(name: str) -> str:
    """Returns the name that .gin files have for a field: "Data.train" for "Pairs.train"."""
    section, _, field = name.partition(".")
    for shared, others in _OTHERS.items():
        if section in others and field in SHARED[shared]:
            return f"{shared}.{field}"
    return name


def field_name(name: str, task: str) -> str:
    """Returns the field behind a setting in runs of a task, such as Pairs.train for Data.train.

    The inverse of `public_name`. The section may lack the field: for language models, the result
    for `Data.buckets` is "Data.buckets", although `Data` has no such field.
    """
    section, _, field = name.partition(".")
    if field in SHARED.get(section, ()):
        sections = TASK_SECTIONS.get(task, ())
        section = next((other for other in _OTHERS[section] if other in sections), section)
    return f"{section}.{field}"


def tasks_with(name: str) -> list[str]:
    """Returns the tasks that read the section of a field: ["summarization"] for "Pairs.train"."""
    section = name.partition(".")[0]
    return [task for task, sections in TASK_SECTIONS.items() if section in sections]


def field_names(name: str) -> Iterator[str]:
    """Yields the fields that a setting may refer to: "Data.buckets", "Pairs.buckets" and so on.

    Some of these sections may lack the field.
    """
    section, _, field = name.partition(".")
    yield name
    if field in SHARED.get(section, ()):
        yield from (f"{other}.{field}" for other in _OTHERS[section])
