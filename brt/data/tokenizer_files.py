"""Opens sentencepiece models and tokenizer.json files, and reports faults of these files."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import sentencepiece

from brt import bounded, untrusted
from brt.data import tokenizer_trial
from brt.data.special_tokens import Added
from brt.errors import ConfigError, DataError

MAX_BYTES = 64 << 20
# A tokenizer whose ids are bytes needs no file. Where brt stores the files of tokenizers, a file of
# this name stands for such a tokenizer.
BYTES = "bytes.txt"
_NAMES = {
    "'bytes'": "bytes", "'path/to/file.model'": ".model", "'path/to/tokenizer.json'": ".json",
}  # fmt: skip
T = TypeVar("T")


def load(name: str, readers: Mapping[str, Callable[[Path], T]]) -> T:
    """Returns the tokenizer of a name, which is "bytes" or the path of a file.

    `readers` are functions that open a tokenizer, for "bytes" and for suffixes of files. If there
    is none for the name, ConfigError is raised.
    """
    kind = "bytes" if name == "bytes" or Path(name).name == BYTES else Path(name).suffix
    if kind not in readers:
        known = [text for text, ending in _NAMES.items() if ending in readers]
        raise ConfigError(
            f"Data.tokenizer = '{name}' is none of {', '.join(known)}, 'train:VOCAB_SIZE'"
        )
    return readers[kind](Path(name))


def read(path: Path) -> bytes:
    try:
        return untrusted.read_file(path, MAX_BYTES)
    except OSError as error:
        raise DataError(f"the tokenizer {path} cannot be read: {error.strerror}") from error


@contextlib.contextmanager
def guarded(path: Path | str, what: str = "cannot read a text") -> Iterator[None]:
    """Context in which a foreign tokenizer opens, encodes or decodes; a failure is a DataError."""
    # The tokenizers library raises Exception itself, so no subclass could be caught. If it panics,
    # the class of the error does not even derive from Exception.
    try:
        yield
    except BaseException as error:
        panics = type(error).__name__ == "PanicException"
        if isinstance(error, DataError | MemoryError) or not (
            isinstance(error, Exception) or panics
        ):
            raise
        gave_up = "the library that reads it gave up: " * panics
        raise DataError(f"the tokenizer {path} {what} ({gave_up}{error})") from error


def _try(path: Path, content: bytes) -> None:
    try:
        tokenizer_trial.check(path.name, content)
    except bounded.Refused as error:
        raise DataError(f"the tokenizer {path} cannot be used: {error}; name another") from error


def sentencepiece_model(
    path: Path, content: bytes, *, exact: bool = False
) -> sentencepiece.SentencePieceProcessor:
    """Opens a sentencepiece model with this `content`.

    `exact` disables the model's dummy prefix and removal of whitespace, which change texts.
    """
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2

    _try(path, content)
    model = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]  # generated code
    with guarded(path, "is not a sentencepiece model"):
        model.ParseFromString(content)
        if exact:
            model.normalizer_spec.add_dummy_prefix = False
            model.normalizer_spec.remove_extra_whitespaces = False
        processor = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
        if processor.vocab_size() == 0:
            raise DecodeError("it has no pieces")
        processor.id_to_piece([*range(processor.vocab_size())])
    return processor


def with_pieces(path: Path, content: bytes, added: Iterable[Added]) -> bytes:
    """Returns the content of a sentencepiece model with further pieces after its own."""
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]  # generated code
    with guarded(path, "is not a sentencepiece model"):
        model.ParseFromString(content)
    kinds = sentencepiece_model_pb2.ModelProto.SentencePiece  # type: ignore[attr-defined]
    for token in added:
        kind = kinds.CONTROL if token.special else kinds.USER_DEFINED
        model.pieces.add(piece=token.piece.replace(" ", "\u2581"), score=0.0, type=kind)
    return model.SerializeToString()


def json_model(path: Path, content: bytes) -> Any:
    """Opens a tokenizer.json as a `tokenizers.Tokenizer`, without truncation and padding."""
    from tokenizers import Tokenizer

    _try(path, content)
    with guarded(path, "is not a tokenizer.json"):
        tokenizer = Tokenizer.from_buffer(content)
    vocabulary = tokenizer.get_vocab()
    if sorted(vocabulary.values()) != [*range(len(vocabulary))]:
        raise DataError(f"the ids of the tokenizer {path} are not 0 to {len(vocabulary) - 1:,}")
    # Truncation and padding, which the file may enable, would change the ids of a text.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # With this option, `</s>` inside of a text is encoded as text and not as a special token.
    tokenizer.encode_special_tokens = True
    with guarded(path, "cannot encode a text"):
        (encoding,) = tokenizer.encode_batch_fast(["a text"], add_special_tokens=False)
    if not encoding.ids:
        raise DataError(
            f"the tokenizer {path} drops all of a text; remove the part that drops it, such as its "
            "post_processor"
        )
    return tokenizer
