"""Opens sentencepiece models and tokenizer.json files, and reports faults of these files.

Before brt opens a foreign tokenizer, the tokenizer is tried: a child process with limited memory
and time opens it, and encodes and decodes some texts of usual characters. Some rules of a
normalizer concern only rare characters, which these texts lack. Therefore the trial also computes
from the rules how much they lengthen a text, and limits this factor.
"""

import base64
import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import sentencepiece

from brt import bounded, storage, untrusted
from brt.data import originals
from brt.data.special_tokens import Added
from brt.errors import ConfigError, DataError

MAX_BYTES = 64 << 20
# A tokenizer whose ids are bytes needs no file. Where brt stores the files of tokenizers, a file of
# this name stands for such a tokenizer.
BYTES = "bytes.txt"
_SENTENCEPIECE = b"sentencepiece"
_NAMES = {
    "'bytes'": "bytes", "'path/to/file.model'": ".model", "'path/to/tokenizer.json'": ".json",
}  # fmt: skip
# The rules of a tokenizer may together lengthen a text at most by this factor. For comparison: the
# normalization to NFKC makes one character 11 times as long.
GROWTH = 256
LONGEST = 1 << 14  # The text of one id may have at most this number of bytes.
_CHUNK = 4096
TRIED = (
    "a", "a text", "Ab 12,\n\n\t  – é 山 \U0001f600 ﷺ ▁\r\n" * 40,
    *(piece * (_CHUNK // len(piece)) + "!" for piece in ("a", " ", "0", "é", "\n", "ab ", ", ")),
)  # fmt: skip
T = TypeVar("T")


def load(name: str, readers: Mapping[str, Callable[[Path], T]]) -> T:
    """Returns the tokenizer of a name, which is "bytes" or the path of a file.

    `readers` maps "bytes" and suffixes of files to the functions that open such a tokenizer. A name
    without a reader raises ConfigError.
    """
    kind = "bytes" if name == "bytes" or Path(name).name == BYTES else Path(name).suffix
    if kind not in readers:
        known = [text for text, ending in _NAMES.items() if ending in readers]
        raise ConfigError(
            f"Data.tokenizer = '{name}' is none of {', '.join(known)}, 'train:VOCAB_SIZE'"
        )
    return readers[kind](
        Path(
            name
            if name == "bytes"
            else storage.tokenizer(name, (*originals.TOKENIZER, *originals.MODEL))
        )
    )


def read(path: Path) -> bytes:
    try:
        return untrusted.read_file(path, MAX_BYTES)
    except OSError as error:
        raise DataError(f"the tokenizer {path} cannot be read: {error.strerror}") from error


@contextlib.contextmanager
def guarded(path: Path | str, what: str = "cannot read a text") -> Iterator[None]:
    """Context in which a foreign tokenizer is used; a failure becomes a DataError with `what`."""
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


def _check(path: Path, content: bytes) -> None:
    """Tries a tokenizer in a child process, unless the same file was tried before."""
    kind = b"json" if path.name.endswith(".json") else _SENTENCEPIECE
    try:
        bounded.check(__name__, kind + b"\n" + content, bounded.key(kind, content))
    except bounded.Refused as error:
        raise DataError(f"the tokenizer {path} cannot be used: {error}; name another") from error


def trust(content: bytes) -> None:
    """Notes that brt itself has trained a sentencepiece model, so that `_check` does not try it."""
    bounded.trust(bounded.key(_SENTENCEPIECE, content))


def _parsed(content: bytes) -> Any:
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]  # generated code
    model.ParseFromString(content)
    return model


def _processor(model: Any, exact: bool) -> sentencepiece.SentencePieceProcessor:
    if exact:
        model.normalizer_spec.add_dummy_prefix = False
        model.normalizer_spec.remove_extra_whitespaces = False
    return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())


def sentencepiece_model(
    path: Path, content: bytes, *, exact: bool = False
) -> sentencepiece.SentencePieceProcessor:
    """Opens a sentencepiece model with this `content`.

    `exact` disables the model's dummy prefix and removal of whitespace, which change texts.
    """
    _check(path, content)
    with guarded(path, "is not a sentencepiece model"):
        processor = _processor(_parsed(content), exact)
        if processor.vocab_size() == 0:
            raise ValueError("it has no pieces")
        processor.id_to_piece([*range(processor.vocab_size())])
    return processor


def with_pieces(path: Path, content: bytes, added: Iterable[Added]) -> bytes:
    """Returns the content of a sentencepiece model with further pieces after its own."""
    with guarded(path, "is not a sentencepiece model"):
        model = _parsed(content)
    kinds = type(model).SentencePiece
    for token in added:
        kind = kinds.CONTROL if token.special else kinds.USER_DEFINED
        model.pieces.add(piece=token.piece.replace(" ", "\u2581"), score=0.0, type=kind)
    return model.SerializeToString()


def _plain(content: bytes) -> Any:
    """Opens a tokenizer.json without truncation and padding, which would change the ids."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_buffer(content)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def json_model(path: Path, content: bytes) -> Any:
    """Opens a tokenizer.json as a `tokenizers.Tokenizer`, without truncation and padding."""
    _check(path, content)
    with guarded(path, "is not a tokenizer.json"):
        tokenizer = _plain(content)
    vocabulary = tokenizer.get_vocab()
    if sorted(vocabulary.values()) != [*range(len(vocabulary))]:
        raise DataError(f"the ids of the tokenizer {path} are not 0 to {len(vocabulary) - 1:,}")
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


def _try(request: bytes) -> None:
    kind, _, content = request.partition(b"\n")
    (_try_sentencepiece if kind == _SENTENCEPIECE else _try_json)(content)


def _try_json(content: bytes) -> None:
    tokenizer = _plain(content)
    pieces = tokenizer.get_vocab()
    _check_growth("piece", max(map(_length, pieces), default=0), LONGEST)
    # The rules are read from the library, not from the file, which it may understand differently.
    _check_growth("normalizer", _growth(tokenizer.normalizer), GROWTH)
    _check_growth("decoder", _growth(tokenizer.decoder), GROWTH)
    for text in TRIED:
        with _ignored_errors():
            tokenizer.encode_batch_fast([text], add_special_tokens=False)
            tokenizer.decode(tokenizer.encode(text).ids)
            tokenizer.encode(text, "b")


def _growth(part: Any) -> float:
    """Returns the largest factor by which a normalizer or decoder lengthens texts."""
    # Some rules concern only characters that their settings name. The texts of TRIED may lack these
    # characters, so the growth by such rules is computed from the settings. All other rules count
    # as 1 here, because the trial applies them to the texts of TRIED.
    return _factor(untrusted.parse_json(part.__getstate__())) if part else 1.0


def _factor(rule: dict[str, Any]) -> float:
    match rule["type"]:
        case "Sequence":
            rules = rule.get("normalizers") or rule.get("decoders") or []
            return math.prod(map(_factor, rules))
        case "Prepend":
            return 1 + _length(rule["prepend"])
        case "Replace":
            # A pattern that is no "String" is a regular expression. It may match before every
            # character without removing the character.
            replaced, new = rule["pattern"].get("String"), _length(rule["content"])
            return max(1, new / max(1, _length(replaced))) if replaced else 1 + new
        case "Precompiled":
            return _longest_replacement(base64.b64decode(rule["precompiled_charsmap"]))
    return 1


def _longest_replacement(charsmap: bytes) -> int:
    """Returns the length of the longest replacement in sentencepiece's table of characters."""
    # The table consists of 4 bytes with the size of a trie, the trie, and the texts, which end with
    # NUL.
    start = 4 + int.from_bytes(charsmap[:4], "little")
    return max(1, *map(len, charsmap[start:].split(b"\0")))


def _try_sentencepiece(content: bytes) -> None:
    model = _parsed(content)
    for spec in (model.normalizer_spec, model.denormalizer_spec):
        _check_growth("normalizer", _longest_replacement(spec.precompiled_charsmap), GROWTH)
    longest = max((_length(piece.piece) for piece in model.pieces), default=0)
    _check_growth("piece", max(longest, _length(model.trainer_spec.unk_surface)), LONGEST)
    for exact in (False, True):
        processor = _processor(model, exact)
        for text in TRIED:
            with _ignored_errors():
                processor.encode([text], return_type="offset_mapping")
                processor.decode(processor.encode(text))


@contextlib.contextmanager
def _ignored_errors() -> Iterator[None]:
    """Ignores the errors that a tokenizer raises for a text of the trial.

    brt itself refuses such a text, with an explanation, when it encodes documents.
    """
    try:
        yield
    except MemoryError:
        raise
    except Exception:
        pass


def _length(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def _check_growth(what: str, found: float, most: int) -> None:
    if found > most:
        raise bounded.Refused(f"its {what} makes a text more than {most:,} times as long")


if __name__ == "__main__":
    bounded.serve(_try)
