"""Reads .gin files and gin bindings as data, with the grammar of the package gin.

No other module imports gin. A file consists of bindings `Section.field = value`, of macros
`NAME = value` that other values use as `%NAME`, and of `include 'path'`. Nothing in a file is
imported or called. brt/bindings.py computes the config that the bindings describe.
"""

import re
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gin import config_parser

from brt import untrusted
from brt.bindings import COMMAND_LINE, MAX_NESTING, MOST_STRINGS, Binding, Macro, Source
from brt.config_io import find_gin_file, shown_path
from brt.errors import ConfigError

_MOST_QUOTED = 100  # Errors quote at most this many characters of a text.
LARGEST_FILE = 1 << 17  # A .gin file has at most this many bytes.
_LIKE_A_NUMBER = re.compile(r"[-+.]*(\d(?!.*[^\W\d_]{2})|nan\b|inf(inity)?\b)", re.I)
# Python concatenates strings if only tokens of these kinds stand between them.
_ADJACENT = (tokenize.STRING, tokenize.NL, tokenize.COMMENT)


def read_sources(files: Sequence[str], texts: Sequence[str]) -> dict[str, Source]:
    """Returns a dictionary of sources: the command line, and all files.

    The key of the command line is `COMMAND_LINE`, and the key of a file is its path. The command
    line includes every --gin_file. Files that these files include are among the results.
    """
    sources = {COMMAND_LINE: Source([], [])}
    for file in files:
        path = find_gin_file(file, asked=f"--gin_file={file}")
        sources[COMMAND_LINE].includes.append(read_file(path, sources, ()))
    for text in texts:
        for statement, origin in _statements(text, COMMAND_LINE):
            _add(statement, origin, COMMAND_LINE, Path(), sources, ())
    return sources


def read_file(path: Path, sources: dict[str, Source], including: tuple[str, ...]) -> str:
    """Adds a file and the files that it includes to `sources`, and returns the file's key.

    Files that `sources` has are not read again. `including` are the keys of the files that include
    this one; a cycle is refused.
    """
    key, shown = str(path.resolve()), shown_path(path)
    if key in including:
        circle = " includes ".join(shown_path(Path(file)) for file in (*including, key))
        raise ConfigError(f"{shown}: files include each other in a circle: {circle}")
    if key not in sources:
        try:
            text = untrusted.read_file(path, LARGEST_FILE).decode("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{shown} cannot be read: {error}") from error
        if len(including) > MAX_NESTING:
            raise ConfigError(f"{shown}: files include files more than {MAX_NESTING} deep")
        sources[key] = Source([], [])
        for statement, origin in _statements(text, shown):
            _add(statement, origin, key, path.parent, sources, (*including, key))
    return key


def _add(
    statement: Any,
    origin: str,
    key: str,
    directory: Path,
    sources: dict[str, Source],
    including: tuple[str, ...],
) -> None:
    """Adds a binding to the source `key`; adds the file of an include statement to `sources`."""
    match statement:
        case config_parser.BindingStatement():
            name = ".".join(filter(None, (statement.selector, statement.arg_name)))
            if statement.scope:
                raise ConfigError(
                    f"{origin}: {statement.scope}/{name} has a scope; bind {name} itself"
                )
            sources[key].bindings.append(Binding(name, statement.value, origin))
        case config_parser.IncludeStatement(filename=file):
            asked = f"{origin}: include {file!r}"
            path = find_gin_file(file, asked=asked, beside=directory)
            sources[key].includes.append(read_file(path, sources, including))
        case config_parser.ImportStatement():
            raise ConfigError(
                f"{origin}: {statement.format()!r} is refused; gin files are data here, and every "
                "setting of brt is known without an import"
            )
        case config_parser.BlockDeclaration():
            pass  # The bindings of the block follow as statements of their own.


class _Grammar(config_parser.ConfigParser):
    """A parser of gin's grammar that has limits, and refuses dictionaries with a repeated key."""

    _keys: set[Any] = set()
    _depth = _strings = 0  # `_depth` counts open brackets, `_strings` adjacent strings.

    def _advance_one_token(self) -> None:
        super()._advance_one_token()
        kind = self._current_token.type
        self._strings = (self._strings + (kind == tokenize.STRING)) * (kind in _ADJACENT)
        if self._strings > MOST_STRINGS:
            self._raise_syntax_error(f"more than {MOST_STRINGS} strings side by side")

    def _maybe_parse_container(self) -> tuple[bool, Any]:
        outer, self._keys, self._depth = self._keys, set(), self._depth + 1
        if self._depth > MAX_NESTING:
            self._raise_syntax_error(f"brackets are nested more than {MAX_NESTING} deep")
        result = super()._maybe_parse_container()
        self._keys, self._depth = outer, self._depth - 1
        return result

    def _parse_dict_item(self) -> tuple[Any, Any]:
        key, value = super()._parse_dict_item()
        if key in self._keys:
            self._raise_syntax_error(f"the key {key!r} is there twice")
        self._keys.add(key)
        return key, value


class _Values(config_parser.ParserDelegate):
    """Keeps macros (%NAME) and records references (@name), which `_statements` refuses.

    Gin's parser calls the methods.
    """

    def __init__(self) -> None:
        self.references: list[str] = []

    def configurable_reference(self, name: str, evaluate: bool) -> None:
        self.references.append(f"@{name}{'()' if evaluate else ''}")

    def macro(self, name: str) -> Macro:
        return Macro(name)


def _statements(text: str, shown: str) -> Iterator[tuple[Any, str]]:
    """Yields the statements of a text in gin's grammar, each with its origin, such as "a.gin:3"."""

    def origin(line: int | None) -> str:
        return f"{shown}:{line}" if line and shown != COMMAND_LINE else shown

    if (nul := text.find("\0")) >= 0:  # Python's tokenizer would accept a NUL.
        place = origin(text.count("\n", 0, nul) + 1)
        raise ConfigError(f"{place}: there is a NUL character; remove it")
    # Bytes of the command line that are not UTF-8, as in names of files, are written as escapes.
    text = re.sub("[\udc80-\udcff]", lambda match: f"\\u{ord(match[0]):04x}", text)
    values = _Values()
    try:
        for statement in _Grammar(text, values):
            place = origin(statement.location.line_num)
            if values.references:
                raise ConfigError(
                    f"{place}: {values.references[0]} is refused; gin files are data here and "
                    "call nothing, so write the value itself"
                )
            yield statement, place
    except SyntaxError as error:
        raise ConfigError(
            f"{origin(error.lineno)}: {_unreadable(error.msg, error.text)}"
        ) from error
    # The parser raises TypeError for a dictionary whose key is a list.
    except (tokenize.TokenError, TypeError) as error:
        raise ConfigError(f"{origin(None)}: {_unreadable(str(error.args[0]), None)}") from error


def _no_value(word: str) -> str:
    """Returns a clause which says that a text is no value, and how to write one."""
    shown = word[:_MOST_QUOTED]
    if _LIKE_A_NUMBER.match(word):
        return f"{shown} is no number that a setting may have; write one such as 12, -0.5 or 1e-4"
    if word[0] in "'\"":
        return f"{shown} is no single text in quotes"
    remedy = f" ({word!r})" if word == shown else ""
    return f"{shown} is no value; text needs quotes{remedy}, booleans are True, False"


def _unreadable(message: str, line: str | None) -> str:
    """Returns a clear sentence for a syntax error of gin's parser."""
    # The text after the = is the value if there is only one =, and the text begins with no bracket.
    word = (line or "").partition("=")[2].partition("#")[0].strip()
    word = "" if word[:1] in ("(", "[", "{") or "=" in word else word
    if match := re.search("Failed to parse token '(.*)'", message):
        reason = _no_value(word) if word else f"{match[1][:_MOST_QUOTED]} is no value"
    elif message.startswith(("Unable to parse value", "Expected newline")) and word:
        reason = _no_value(word)
    else:
        reason = " ".join(message.split())[:_MOST_QUOTED].rstrip(".")
    quoted = f" {line.strip()[:_MOST_QUOTED]!r}" if line else " it"
    return f"cannot read{quoted}: {reason}"
