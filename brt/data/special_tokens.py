"""What the files of a directory of Hugging Face say of special tokens: with which token a document
begins, which tokens end a text, and which tokens were added to the file of the tokenizer.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from brt import untrusted
from brt.errors import DataError

# A tokenizer begins documents with the first of these pieces that it has, if no file says anything.
START = ("<|begin_of_text|>", "<s>", "<|endoftext|>", "[CLS]", "<bos>")
_MOST_ADDED = 1 << 16
# These files name special tokens by their pieces; the earlier one has more authority.
_NAMING = ("tokenizer_config.json", "special_tokens_map.json")
_READ = (*_NAMING, "tokenizer.json", "added_tokens.json", "config.json", "generation_config.json")


class Claim(NamedTuple):
    """What one file says: `place` names the file and the key, `token` is an id or a piece."""

    place: str
    token: int | str

    def __str__(self) -> str:
        return f"{self.place} = {self.token!r:.80}"


class Added(NamedTuple):
    """A token that was added to a tokenizer; special tokens stand for no text."""

    token: int
    piece: str
    special: bool


class Statements(NamedTuple):
    """What the files say.

    Attributes:
      begin: the tokens that begin a document; earlier entries have more authority.
      end: the tokens that end a text.
      added: the added tokens, by id.
      notes: where files contradict each other about what transformers puts around a text.
    """

    begin: tuple[Claim, ...] = ()
    end: tuple[Claim, ...] = ()
    added: tuple[Added, ...] = ()
    notes: tuple[str, ...] = ()


class Beginning(NamedTuple):
    """With which id documents begin, -1 for none, and what the user should know about it."""

    token: int
    notes: tuple[str, ...] = ()


def read(
    place: Path, files: Mapping[str, bytes], described: Mapping[str, Any] | None = None
) -> Statements:
    """Returns what files say of special tokens.

    Args:
      place: the path of the tokenizer, for error messages.
      files: the contents of the files beside the tokenizer, by name.
      described: the content of the tokenizer's own tokenizer.json; None if it has another file.

    Raises:
      DataError: a file is not a JSON object, or the list of added tokens is damaged.
    """
    try:
        contents: dict[str, Mapping[str, Any]]
        contents = {name: _json(name, files[name]) for name in _READ if name in files}
        if described is not None:
            contents["tokenizer.json"] = described
        begin = [
            *_processor(contents.get("tokenizer.json", {})),
            *_pieces(contents, "bos_token"),
            *_default(contents),
            *_ids(contents, "bos_token_id"),
        ]
        end = [*_ids(contents, "eos_token_id"), *_pieces(contents, "eos_token")]
        return Statements(tuple(begin), tuple(end), _added(contents), tuple(_around(contents)))
    except ValueError as error:
        raise DataError(
            f"the files beside the tokenizer {place} cannot be used: {error}"
        ) from error


def beginning(
    said: Statements, id_of: Callable[[int | str], int | None], default: int
) -> Beginning:
    """Chooses the id that documents begin with.

    Args:
      said: what the files say.
      id_of: a function that returns the id of an id or a piece; None if it is no special token of
        the tokenizer.
      default: the id if no file names a token; -1 for none.
    """
    known = [(claim, id_of(claim.token)) for claim in said.begin]
    unknown = [claim for claim, i in known if i is None]
    notes = [*said.notes, *(f"{claim} is no special token of the tokenizer" for claim in unknown)]
    valid = [(claim, i) for claim, i in known if i is not None]
    if valid:
        first, chosen = valid[0]
        others = [str(claim) for claim, i in valid if i != chosen]
        if others:
            notes.append(f"{first} contradicts {', '.join(others)}; documents begin with the first")
        return Beginning(chosen, tuple(notes))
    for claim in said.end:
        if (end := id_of(claim.token)) is not None:
            notes.append(f"no file names a BOS, so documents begin with the end token: {claim}")
            return Beginning(end, tuple(notes))
    return Beginning(default, tuple(notes))


def missing(
    place: Path, said: Statements, size: int, id_of: Callable[[str], int | None]
) -> list[Added]:
    """Returns those added tokens that the file of a tokenizer lacks, in the order of their ids.

    Args:
      place: the path of the tokenizer, for error messages.
      said: what the files say.
      size: the number of ids of the file.
      id_of: a function that returns the id of a piece in the file; None if the file lacks it.

    Raises:
      DataError: the ids contradict the file, or do not follow those of the file without a gap.
    """
    found = []
    for added in said.added:
        if (known := id_of(added.piece)) == added.token:
            continue
        if known is not None or added.token != size + len(found):
            raise DataError(
                f"the tokenizer {place} has {size:,} ids, and the files beside it give the added "
                f"token {added.piece!r:.80} the id {added.token}, "
                f"{'which contradicts the file' if known is not None else 'which does not follow'}"
                "; correct added_tokens.json and tokenizer_config.json"
            )
        found.append(added)
    return found


def identity(content: bytes, token: int, default: int, added: list[Added]) -> bytes:
    """Returns bytes that determine the ids of texts; `content` alone where no file changes them.

    Args:
      content: the content of the file of the tokenizer.
      token: the id that documents begin with.
      default: the id that they would begin with if there was no other file.
      added: the tokens that the file lacks.
    """
    if token == default and not added:
        return content
    return content + json.dumps(["begin", token, "added", added]).encode()


def _json(name: str, content: bytes) -> dict[str, Any]:
    try:
        return untrusted.checked_json(content, {})
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _processor(described: Mapping[str, Any]) -> list[Claim]:
    """Returns the special token that the post-processor of a tokenizer.json puts before a text."""
    pieces = [_edge(step, 0, "cls") for step in _steps(described)]
    return [Claim("tokenizer.json: post_processor", piece) for piece in pieces if piece][:1]


def _ends(described: Mapping[str, Any]) -> bool:
    """Returns True if the post-processor of a tokenizer.json puts a special token after a text."""
    return any(_edge(step, -1, "sep") for step in _steps(described))


def _steps(described: Mapping[str, Any]) -> list[Any]:
    steps = described.get("post_processor")
    if isinstance(steps, dict):
        steps = steps.get("processors", [steps])
    return steps if isinstance(steps, list) else []


def _edge(step: Any, place: int, name: str) -> str | None:
    """Returns the special token that a step of a post-processor puts at one end of a text.

    Args:
      step: the description of the step.
      place: the index of the token in a template: 0 for the first one, -1 for the last one.
      name: the name of the token in a processor of the kind of BERT's.
    """
    step = step if isinstance(step, dict) else {}
    token = None
    if step.get("type") == "TemplateProcessing":
        token = _at(step.get("single"), place)
        token = token.get("SpecialToken") if isinstance(token, dict) else None
        token = token.get("id") if isinstance(token, dict) else None
    elif step.get("type") in ("RobertaProcessing", "BertProcessing"):
        token = _at(step.get(name), 0)
    return token if isinstance(token, str) else None


def _at(values: Any, place: int) -> Any:
    return values[place] if isinstance(values, list) and values else None


def _default(contents: Mapping[str, Mapping[str, Any]]) -> list[Claim]:
    """Returns the BOS that transformers puts before a text if no file names one: "<s>".

    transformers puts a BOS if tokenizer_config.json says `add_bos_token`; but it ignores this key,
    and `add_eos_token`, if there is a tokenizer.json, whose post-processor decides.
    """
    asked = contents.get("tokenizer_config.json", {}).get("add_bos_token") is True
    named = "tokenizer.json" in contents or _pieces(contents, "bos_token")
    default = Claim("tokenizer_config.json: add_bos_token = True, BOS", "<s>")
    return [default] if asked and not named else []


def _around(contents: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns notes about `add_bos_token` and `add_eos_token`, where transformers 5 does not do
    what they say, or where brt does something else.
    """
    settings, described = contents.get("tokenizer_config.json", {}), contents.get("tokenizer.json")
    bos, eos = (settings.get(f"add_{edge}_token") for edge in ("bos", "eos"))
    puts = (bool(_processor(described)), _ends(described)) if described else (bos, eos)
    notes = []
    for name, flag, put in zip(("add_bos_token", "add_eos_token"), (bos, eos), puts, strict=True):
        place = f"tokenizer_config.json: {name} = {flag}"
        if isinstance(flag, bool) and flag != put:
            notes.append(
                f"{place} contradicts the post-processor of tokenizer.json, which transformers 5 "
                "follows"
            )
        elif flag is False and name == "add_bos_token":
            notes.append(f"{place}, but the documents of brt begin with a BOS")
        elif flag is True and name == "add_eos_token":
            notes.append(f"{place}, but brt puts no end token after a prompt")
    return notes


def _pieces(contents: Mapping[str, Mapping[str, Any]], key: str) -> list[Claim]:
    found = [(name, _piece(contents.get(name, {}).get(key))) for name in _NAMING]
    return [Claim(f"{name}: {key}", piece) for name, piece in found if piece]


def _piece(token: Any) -> str | None:
    """Returns the piece of a token that a file gives as a string or as an object."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _ids(contents: Mapping[str, Mapping[str, Any]], key: str) -> list[Claim]:
    """Returns a claim for every id, of which a file may give one or a list."""
    found = []
    for name in ("config.json", "generation_config.json"):
        ids = contents.get(name, {}).get(key)
        for i in ids if isinstance(ids, list) else [ids]:
            if isinstance(i, int) and not isinstance(i, bool):
                found.append(Claim(f"{name}: {key}", i))
    return found


def _added(contents: Mapping[str, Mapping[str, Any]]) -> tuple[Added, ...]:
    """Returns the added tokens of added_tokens.json and of tokenizer_config.json, by id."""
    special: set[str | None] = set()
    for settings in (contents.get(name, {}) for name in _NAMING):
        special |= {_piece(value) for key, value in settings.items() if key.endswith("_token")}
        for tokens in map(settings.get, ("additional_special_tokens", "extra_special_tokens")):
            special |= set(map(_piece, tokens if isinstance(tokens, list) else ()))
    pieces = contents.get("added_tokens.json", {})
    untrusted.check(pieces, {str: int}, "added_tokens.json")
    found = {i: Added(i, piece, piece in special) for piece, i in pieces.items()}
    decoder = contents.get("tokenizer_config.json", {}).get("added_tokens_decoder") or {}
    untrusted.check(decoder, {str: dict}, "added_tokens_decoder")
    for i, token in decoder.items():
        piece = _piece(token)
        if not (i.isascii() and i.isdecimal() and len(i) < 10 and piece):
            raise ValueError(f"added_tokens_decoder: {i!r:.80} names no token")
        found[int(i)] = Added(int(i), piece, bool(token.get("special", piece in special)))
    if len(found) > _MOST_ADDED:
        raise ValueError(f"{len(found):,} added tokens are more than {_MOST_ADDED:,}")
    return tuple(found[i] for i in sorted(found))
