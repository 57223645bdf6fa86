"""Opens the two kinds of tokenizer files, or says what is wrong with them."""

from pathlib import Path
from typing import Any

import sentencepiece

from brt import untrusted
from brt.errors import DataError

MAX_BYTES = 64 << 20
BYTES = "bytes.txt"  # stands in a directory for "bytes", which needs no file


def read(path: Path) -> bytes:
    """The content of a tokenizer's file.

    Raises:
      DataError: it is missing, or too large to be one.
    """
    try:
        return untrusted.read_file(path, MAX_BYTES)
    except OSError as error:
        raise DataError(f"the tokenizer {path} cannot be read: {error.strerror}") from error


def sentencepiece_model(
    path: Path, content: bytes, *, exact: bool = False
) -> sentencepiece.SentencePieceProcessor:
    """A sentencepiece model.

    Args:
      exact: without its dummy prefix and whitespace removal, which change texts.

    Raises:
      DataError: it is none.
    """
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]  # made on import
    try:
        model.ParseFromString(content)
        if exact:
            model.normalizer_spec.add_dummy_prefix = False
            model.normalizer_spec.remove_extra_whitespaces = False
        processor = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
        if processor.vocab_size() == 0:
            raise DecodeError("it has no pieces")
        processor.id_to_piece([*range(processor.vocab_size())])
    except (DecodeError, RuntimeError, UnicodeDecodeError) as error:
        raise DataError(f"the tokenizer {path} is no sentencepiece model ({error})") from error
    return processor


def json_model(path: Path, content: bytes) -> Any:
    """A tokenizer.json of Hugging Face's tokenizers that neither cuts nor pads.

    Raises:
      DataError: it is none, or its ids have holes, so that they are not below their number.
    """
    from tokenizers import Tokenizer

    try:
        with untrusted.panics():
            tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises nothing more specific
        raise DataError(f"the tokenizer {path} is no tokenizer.json ({error})") from error
    vocabulary = tokenizer.get_vocab()
    if sorted(vocabulary.values()) != [*range(len(vocabulary))]:
        raise DataError(f"the ids of the tokenizer {path} are not 0 to {len(vocabulary) - 1:,}")
    tokenizer.no_truncation()  # the file may ask for both
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # `</s>` in a text is text, and ends nothing
    try:
        (kept,) = tokenizer.encode_batch_fast(["a text"], add_special_tokens=False)
    except Exception as error:  # the library raises nothing more specific
        raise DataError(f"the tokenizer {path} reads no text ({error})") from error
    if not kept.ids:
        raise DataError(
            f"the tokenizer {path} keeps nothing of a text; take out what drops it, such as its "
            "post_processor"
        )
    return tokenizer
