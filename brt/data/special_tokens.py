"""Reads what the files in a Hugging Face model's directory say of special tokens.

The files say with which token a document begins, which tokens end a text, and which tokens were
added to the file of the tokenizer.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from brt import untrusted
from brt.errors import DataError

# If no file names a token, documents begin with the first of these pieces that the tokenizer has.
START = ("<|begin_of_text|>", "<s>", "<|endoftext|>", "[CLS]", "<bos>")
_MOST_ADDED = 1 << 16
# These files name special tokens by their pieces. If they differ, the first file counts.
_NAMING = ("tokenizer_config.json", "special_tokens_map.json")
_READ = (*_NAMING, "tokenizer.json", "added_tokens.json", "config.json", "generation_config.json")


class Claim(NamedTuple):
    """What one file says: `place` names the file and the key, `token` is an id or a piece."""

    place: str
    token: int | str

    def __str__(self) -> str:
        return f"{self.place} = {self.token!r:.80}"


class Added(NamedTuple):
    """A token that was added to a tokenizer; if `special` is True, it stands for no text."""

    token: int
    piece: str
    special: bool


class Statements(NamedTuple):
    """What the files say of special tokens. The first claim whose token is known counts."""

    begin: tuple[Claim, ...] = ()  # the tokens that begin a document
    end: tuple[Claim, ...] = ()  # the tokens that end a text
    added: tuple[Added, ...] = ()  # in the order of ids
    notes: tuple[str, ...] = ()  # contradictions about what transformers puts around a text


def read(
    place: Path, files: Mapping[str, bytes], described: Mapping[str, Any] | None = None
) -> Statements:
    """Returns what the files beside a tokenizer say of special tokens.

    `files` maps the names of these files to their content. `described` is the parsed content of the
    tokenizer's own tokenizer.json; None if the tokenizer is in a file of another kind.
    """
    try:
        contents: dict[str, Mapping[str, Any]]
        contents = {name: _json(name, files[name]) for name in _READ if name in files}
        if described is not None:
            contents["tokenizer.json"] = described
        begin = [
            *(
                Claim("tokenizer.json: post_processor", piece)
                for piece in _edges(contents.get("tokenizer.json", {}), 0, "cls")[:1]
            ),
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


def named(files: Mapping[str, bytes], keys: Iterable[str]) -> dict[str, str]:
    """Returns the piece that files name under each of `keys`, such as "eos_token", by key."""
    contents = {name: _json(name, files[name]) for name in _NAMING if name in files}
    found = {key: _pieces(contents, key) for key in keys}
    return {key: f"{claims[0].token}" for key, claims in found.items() if claims}


def beginning(
    said: Statements, id_of: Callable[[int | str], int | None], default: int
) -> tuple[int, tuple[str, ...]]:
    """Returns the id that documents begin with, and what the user should know about it.

    `default` is the id if no file names a token. `id_of` returns the id of a special token, given
    the id or the piece; None if the tokenizer has no such token.
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
        return chosen, tuple(notes)
    for claim in said.end:
        if (end := id_of(claim.token)) is not None:
            notes.append(f"no file names a BOS, so documents begin with the end token: {claim}")
            return end, tuple(notes)
    return default, tuple(notes)


def missing(
    place: Path, said: Statements, size: int, id_of: Callable[[str], int | None]
) -> list[Added]:
    """Returns those added tokens that the file of a tokenizer lacks, in the order of their ids.

    The file has `size` ids, and `id_of` returns the id of a piece in the file. DataError is raised
    unless the ids of the added tokens follow the ids of the file without a gap.
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
    """Returns bytes that determine the ids of texts.

    They are the `content` of the tokenizer's file. If other files change the ids, the changes are
    appended: the id of BOS, `token` instead of `default`, and the `added` tokens.
    """
    if token == default and not added:
        return content
    return content + json.dumps(["begin", token, "added", added]).encode()


def _json(name: str, content: bytes) -> dict[str, Any]:
    try:
        return untrusted.checked_json(content, {})
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _part(value: Any, *path: str | int) -> Any:
    """Returns the part of JSON at a path of keys and indices; None if there is none."""
    for key in path:
        if isinstance(value, dict):
            value = value.get(key)
        else:
            value = value[key] if isinstance(value, list) and value and key in (0, -1) else None
    return value


def _edges(described: Mapping[str, Any], place: int, name: str) -> list[str]:
    """Returns special tokens that the post-processor of a tokenizer.json puts at one end of texts.

    `place` is the index of the token in a template, 0 at the start of a text and -1 at its end;
    `name` is the token's key in a RobertaProcessing or BertProcessing.
    """
    steps = described.get("post_processor")
    steps = _part(steps, "processors") or [steps]
    paths = {
        "TemplateProcessing": ("single", place, "SpecialToken", "id"),
        "RobertaProcessing": (name, 0),
        "BertProcessing": (name, 0),
    }
    found = [
        _part(step, *paths[kind])
        for step in (steps if isinstance(steps, list) else [])
        if isinstance(kind := _part(step, "type"), str) and kind in paths
    ]
    return [token for token in found if isinstance(token, str)]


def _default(contents: Mapping[str, Mapping[str, Any]]) -> list[Claim]:
    """Returns a claim for the default BOS "<s>" if transformers puts it before a text; else [].

    transformers does this if tokenizer_config.json says `add_bos_token`, no file names a BOS, and
    there is no tokenizer.json. If there is a tokenizer.json, its post-processor decides, and
    transformers ignores `add_bos_token` and `add_eos_token`.
    """
    asked = contents.get("tokenizer_config.json", {}).get("add_bos_token") is True
    named = "tokenizer.json" in contents or _pieces(contents, "bos_token")
    default = Claim("tokenizer_config.json: add_bos_token = True, BOS", "<s>")
    return [default] if asked and not named else []


def _around(contents: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns notes about the settings `add_bos_token` and `add_eos_token`.

    There is a note if transformers 5 or brt does something else than the setting says.
    """
    settings, described = contents.get("tokenizer_config.json", {}), contents.get("tokenizer.json")
    bos, eos = (settings.get(f"add_{edge}_token") for edge in ("bos", "eos"))
    puts = bos, eos
    if described:
        puts = bool(_edges(described, 0, "cls")), bool(_edges(described, -1, "sep"))
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
    token = _part(token, "content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _ids(contents: Mapping[str, Mapping[str, Any]], key: str) -> list[Claim]:
    """Returns a claim for every id under a key; a file may have one id or a list of ids there."""
    found = []
    for name in ("config.json", "generation_config.json"):
        ids = contents.get(name, {}).get(key)
        for i in ids if isinstance(ids, list) else [ids]:
            if isinstance(i, int) and not isinstance(i, bool):
                found.append(Claim(f"{name}: {key}", i))
    return found


def _added(contents: Mapping[str, Mapping[str, Any]]) -> tuple[Added, ...]:
    """Returns the tokens of added_tokens.json and of tokenizer_config.json, in the order of ids."""
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
