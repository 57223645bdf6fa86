"""Opens a foreign tokenizer in a child process, and encodes and decodes some texts with it.

The texts show how much memory and time the tokenizer takes for usual characters. A rule can be
limited to rare characters, so the trial also limits how much each rule may lengthen a text.
"""

import base64
import contextlib
import math
from collections.abc import Iterator
from typing import Any

from brt import bounded

# The rules of a tokenizer may together lengthen a text at most by this factor. Normalizing to NFKC
# lengthens one character by a factor of 11.
GROWTH = 256
LONGEST = 1 << 14  # The text of one id may have at most this number of bytes.
_CHUNK = 4096
TEXTS = (
    "a", "a text", "Ab 12,\n\n\t  – é 山 \U0001f600 ﷺ ▁\r\n" * 40,
    *(piece * (_CHUNK // len(piece)) + "!" for piece in ("a", " ", "0", "é", "\n", "ab ", ", ")),
)  # fmt: skip


def check(path: str, content: bytes) -> None:
    """Tries a tokenizer in a child process, unless the same file was tried before.

    One that takes too much memory or time, or must not be used, raises bounded.Refused.
    """
    kind = b"json" if path.endswith(".json") else b"sentencepiece"
    bounded.check(__name__, kind + b"\n" + content, bounded.key(kind, content))


def trust(content: bytes) -> None:
    """Notes that brt has trained this sentencepiece model, which is therefore not tried."""
    bounded.trust(bounded.key(b"sentencepiece", content))


def _try(request: bytes) -> None:
    kind, _, content = request.partition(b"\n")
    if kind == b"json":
        _try_json(content)
    else:
        _try_sentencepiece(content)


def _try_json(content: bytes) -> None:
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_buffer(content)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    pieces = tokenizer.get_vocab()
    _check_growth("piece", max(map(_length, pieces), default=0), LONGEST)
    # What the library has understood is checked, and not the file.
    _check_growth("normalizer", _growth(tokenizer.normalizer), GROWTH)
    _check_growth("decoder", _growth(tokenizer.decoder), GROWTH)
    for text in TEXTS:
        with _explained_elsewhere():
            tokenizer.encode_batch_fast([text], add_special_tokens=False)
            tokenizer.decode(tokenizer.encode(text).ids)
            tokenizer.encode(text, "b")


def _growth(part: Any) -> float:
    """Returns the largest factor by which a normalizer or decoder lengthens texts."""
    # Only rules of the tokenizers library that can be limited to some characters count.
    from brt import untrusted

    return _factor(untrusted.parse_json(part.__getstate__())) if part else 1.0


def _factor(rule: dict[str, Any]) -> float:
    match rule["type"]:
        case "Sequence":
            rules = rule.get("normalizers") or rule.get("decoders") or []
            return math.prod(map(_factor, rules))
        case "Prepend":
            return 1 + _length(rule["prepend"])
        case "Replace":
            # A regular expression may match at every character, without removing it.
            replaced, new = rule["pattern"].get("String"), _length(rule["content"])
            return max(1, new / max(1, _length(replaced))) if replaced else 1 + new
        case "Precompiled":
            return _longest_replacement(base64.b64decode(rule["precompiled_charsmap"]))
    return 1


def _longest_replacement(charsmap: bytes) -> int:
    """Returns the length of the longest text in the table of characters of sentencepiece."""
    # The table is the size of a trie (4 bytes), the trie, and the texts, which end with NUL.
    start = 4 + int.from_bytes(charsmap[:4], "little")
    return max(1, *map(len, charsmap[start:].split(b"\0")))


def _try_sentencepiece(content: bytes) -> None:
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]  # generated code
    model.ParseFromString(content)
    for spec in (model.normalizer_spec, model.denormalizer_spec):
        _check_growth("normalizer", _longest_replacement(spec.precompiled_charsmap), GROWTH)
    longest = max((_length(piece.piece) for piece in model.pieces), default=0)
    _check_growth("piece", max(longest, _length(model.trainer_spec.unk_surface)), LONGEST)
    for exact in (False, True):
        if exact:
            model.normalizer_spec.add_dummy_prefix = False
            model.normalizer_spec.remove_extra_whitespaces = False
        processor = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
        for text in TEXTS:
            with _explained_elsewhere():
                processor.encode([text], return_type="offset_mapping")
                processor.decode(processor.encode(text))


@contextlib.contextmanager
def _explained_elsewhere() -> Iterator[None]:
    """Ignores the errors of a text, because brt refuses such texts itself, with an explanation."""
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
