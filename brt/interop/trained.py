"""A summariser that was trained here, as what `brt.interop.pretrained` holds."""

from pathlib import Path

from brt.data.pairs import preparation
from brt.errors import CheckpointError
from brt.generation.summaries import special_tokens
from brt.interop.huggingface.config import Described
from brt.interop.pretrained import Pretrained
from brt.training import saved
from brt.training.workdir import Workdir

_NAMES = {".model": "spiece.model", ".json": "tokenizer.json"}  # as others look for them


def is_run(directory: Path) -> bool:
    """Whether it is the workdir of a run."""
    return Workdir(directory).checkpoints.is_dir()


def load(directory: Path) -> Pretrained:
    """The newest checkpoint of a run.

    Raises:
      CheckpointError: there is none, or it is of a language model.
    """
    workdir, found, config = saved.load_config(directory)
    if config.training.objective != "seq2seq":
        raise CheckpointError(
            f"{directory} is the run of another model; only summarisers and encoders have a form "
            "of Hugging Face"
        )
    model = saved.load(workdir, found, config)
    tokenizer = preparation.prepare(config.pairs).tokenizer
    decoding = config.decoding
    generation = {
        "num_beams": decoding.beams,
        "length_penalty": decoding.length_penalty,
        "max_length": decoding.max_length,
        "min_length": decoding.min_length,
        "no_repeat_ngram_size": decoding.no_repeat_ngram,
    }
    described = Described(
        config.seq2seq, config.cross_attention, special_tokens(tokenizer), generation, {}
    )
    return Pretrained(model.params, described)


def attention(directory: Path) -> str:
    """The kind of attention that a run's encoder was trained with."""
    return saved.load_config(directory)[2].attention.kind


def copy_tokenizer(directory: Path, target: Path) -> list[str]:
    """Writes the run's tokenizer; returns its name there."""
    _, _, config = saved.load_config(directory)
    corpus = preparation.prepare(config.pairs)
    (source,) = (p for p in corpus.directory.glob("tokenizer.*") if p.suffix in _NAMES)
    name = _NAMES[source.suffix]
    (target / name).write_bytes(corpus.tokenizer.content)
    return [name]
