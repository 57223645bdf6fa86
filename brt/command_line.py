"""Command line flags, .gin files and exit codes.

This is the only module that imports gin, and only for gin's grammar. Gin files are data here:
`Section.field = value`, `NAME = value` with `%NAME`, and `include 'path'`. Nothing in them is
imported or called; brt/bindings.py gives them their meaning.
"""

import argparse
import contextlib
import os
import re
import sys
import tokenize
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

from gin import config_parser

from brt import allocator, bindings, durable, output, platforms, untrusted
from brt.bindings import Binding, Macro, Resolved, Source
from brt.config import SECTIONS, Config
from brt.config_io import FIELDS, annotated_text, find_gin_file, shown_path, suggestion
from brt.errors import BrtError, CheckpointError, ConfigError, Preempted
from brt.output import write_json

BINDINGS_FLAG = bindings.COMMAND_LINE
LARGEST_FILE = 1 << 17  # largest size of a .gin file in bytes
_OUT_OF_MEMORY = (
    "out of memory; lower Training.batch_size, Training.segment_length or the model's size, or "
    "raise the limit of this process (ulimit -v, a container's); brt.plan says what a run needs"
)
_BETWEEN = (tokenize.STRING, tokenize.NL, tokenize.COMMENT)


class _Parser(argparse.ArgumentParser):
    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        arguments = sys.argv[1:] if args is None else args
        arguments = [re.sub(r"^--gin\.(?=[^=]+=)", f"{BINDINGS_FLAG}=", item) for item in arguments]
        namespace, unknown = self.parse_known_args(arguments, namespace)
        if unknown:
            self.error(self._unknown(unknown[0]))
        output.check_files(vars(namespace))
        return namespace

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (--help lists the flags)")

    def _unknown(self, argument: str) -> str:
        if not argument.startswith("-"):
            hint = f"; did you mean --gin_file={argument}?" if argument.endswith(".gin") else ""
            return f"unexpected argument {argument!r}{hint}"
        flag, _, value = argument.partition("=")
        known = self._option_string_actions
        field = _field(flag.removeprefix("--")) if BINDINGS_FLAG in known else None
        if field:
            setting = f"{field} = {_literal(field, value)}"
            quote = '"' if "'" in setting else "'"
            return (
                f"{field} is no flag of its own; bind it: {BINDINGS_FLAG}={quote}{setting}{quote}"
            )
        return f"unknown flag {flag}{suggestion(flag, known)}"


def _field(name: str) -> str | None:
    """Returns `Training.steps` for `steps`; the first section with such a field is chosen."""
    sections = ("Training", "Optimizer", "Model", *SECTIONS)
    return next((full for s in sections if (full := f"{s}.{name}") in FIELDS), None)


def _literal(field: str, value: str) -> str:
    """Writes the value of a flag as in a .gin file; "..." if there is no value."""
    text = FIELDS[field] is str or typing.get_origin(FIELDS[field]) in (Literal, tuple)
    return (
        repr(value) if text and value and not value.startswith(("(", "'", '"')) else value or "..."
    )


def parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser that accepts only complete flags, and raises ConfigError for others."""
    script = Path(sys.argv[0])
    return _Parser(
        prog=f"python -m brt.{script.stem}" if script.parent == Path(__file__).parent else None,
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """Adds --workdir, --gin_file, --gin_bindings and --print_config, which `resolve` reads."""
    parser.add_argument("--workdir", metavar="DIR", help="directory of the run")
    parser.add_argument(
        "--gin_file", action="append", default=[], metavar="FILE",
        help="a .gin file, from here or from those that come with brt; repeatable",
    )  # fmt: skip
    parser.add_argument(
        BINDINGS_FLAG, "--gin_param", action="append", default=[],
        metavar="'Section.field = value'",
        help="overrides the files; repeatable; short form: --gin.Section.field=value",
    )  # fmt: skip
    parser.add_argument(
        "--print_config", action="store_true", help="print every setting with its origin, and exit"
    )


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    """Adds --json, which `print_figures` reads."""
    parser.add_argument("--json", metavar="FILE", help="also write the results to this file")


def resolve(args: argparse.Namespace, base: Config | None = None) -> Resolved:
    """Returns the config of the flags that `add_config_flags` adds; --print_config exits here.

    Args:
      args: the parsed flags.
      base: the saved config that the flags change, or None for the defaults.

    Raises:
      ConfigError: a file or flag is not valid.
    """
    resolved = read(args.gin_file, args.gin_bindings, base)
    if resolved.note:
        _say(resolved.note)
    if args.print_config:
        print(annotated_text(resolved.config, resolved.origins), end="")
        raise SystemExit(0)
    return resolved


def read(files: Sequence[str], texts: Sequence[str], base: Config | None = None) -> Resolved:
    """Returns the config of .gin files and of bindings that override them; raises as `resolve`."""
    resolved = bindings.resolve(_sources(files, texts), base=base)
    _check_task(resolved)
    return resolved


def variants(
    args: argparse.Namespace, section: str
) -> tuple[dict[str, Binding], Callable[[Sequence[Binding], Sequence[str]], Resolved]]:
    """Returns the bindings of an additional section, and a function that resolves variants.

    The function takes further bindings, which override the files, and paths of further files,
    which the files override as if they included them.

    Args:
      args: the parsed flags.
      section: the name of the section.

    Raises:
      ConfigError: a file or flag is not valid.
    """
    sources = _sources(args.gin_file, args.gin_bindings)
    files = sources[BINDINGS_FLAG].includes

    def resolve_variant(more: Sequence[Binding], includes: Sequence[str]) -> Resolved:
        fixed = {binding.name for binding in sources[BINDINGS_FLAG].bindings}
        for name, _, origin in more:
            if name in fixed:
                raise ConfigError(f"{BINDINGS_FLAG} binds {name}, and so does {origin}; keep one")
        own = {key: Source(list(s.bindings), list(s.includes)) for key, s in sources.items()}
        for include in includes:
            path = find_gin_file(
                include, asked=f"include {include!r}", beside=Path(files[0]).parent
            )
            key = _read_file(path, own, tuple(files))
            for file in files:
                own[file].includes.append(key)
        own["variant"] = Source(list(more), [BINDINGS_FLAG])
        resolved = bindings.resolve(own, beside=section)
        _check_task(resolved)
        return resolved

    return bindings.section(sources, section), resolve_variant


def _check_task(resolved: Resolved) -> None:
    from brt import tasks  # This imports jax.

    try:
        tasks.check(resolved.config, resolved.bound)
    except ConfigError as error:
        raise bindings.explained(error, resolved.bound) from error


@contextlib.contextmanager
def errors_naming(flags: Mapping[str, str]) -> Iterator[None]:
    """Makes errors name flags (`--text_field=body`) instead of settings or arguments.

    Args:
      flags: the flag for each name in errors ("Data.text_field", or "beams=" of an argument).
    """
    names = "|".join(map(re.escape, sorted(flags, key=len, reverse=True)))
    pattern = re.compile(rf"(?<![\w.-])({names})(?![a-z_])(?: = (?:'([^']*)'|(\S+)))?")

    def as_flag(match: re.Match) -> str:
        value = match[2] or match[3]
        return flags[match[1]] + (f"={value}" if value else "")

    try:
        yield
    except BrtError as error:
        raise type(error)(pattern.sub(as_flag, str(error))) from error


def main(
    function: Callable[[argparse.Namespace], int | None], parser: argparse.ArgumentParser
) -> NoReturn:
    """Runs a command and exits; BrtErrors become a sentence and an exit code."""
    output.open_streams()
    output.tell_failures_once()
    allocator.search_rarely()
    platforms.leave_compilers_alone()
    # XLA logs slow compilations as errors. Real failures raise exceptions anyway.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        arguments = parser.parse_args()
        if function.__module__ == "__main__":  # The process belongs to this command alone.
            allocator.use_huge_pages()
        allocator.keep_memory()
        allocator.run_in_place()
        code = function(arguments) or 0
        sys.stdout.flush()
    except Preempted as stop:
        code = _say(str(stop), stop.exit_code)
    except BrtError as error:
        code = _say(f"error: {error}", error.exit_code)
    except KeyboardInterrupt:
        code = _say("interrupted", Preempted.exit_code)
    except BrokenPipeError:
        if not output.reader_is_gone():
            raise
        code = 128 + 13  # the exit code that shells report for SIGPIPE
    except Exception as error:
        if isinstance(error, OSError) and durable.storage_refuses(error):
            code = _say(f"error: {durable.sentence(error)}", CheckpointError.exit_code)
        elif allocator.exhausted(error):
            code = _say(f"error: {_OUT_OF_MEMORY}", ConfigError.exit_code)
        else:
            raise
    sys.exit(code)


def print_figures(figures: Mapping[str, Any], path: str | None, workdir: str | None) -> None:
    """Prints results by name, one per line, and writes them to `path` if it is given."""
    width = max(map(len, figures))
    for name, value in figures.items():
        shown = f"{value:,}" if isinstance(value, int) else value
        print(f"{name:<{width}}  {f'{value:.4f}' if isinstance(value, float) else shown}")
    if path:
        write_json(path, figures, workdir)


def _say(message: str, code: int = 0) -> int:
    print(f"brt: {message}", file=sys.stderr, flush=True)
    return code


def _sources(files: Sequence[str], texts: Sequence[str]) -> dict[str, Source]:
    """Returns all files by their path, and the command line as a source that includes them."""
    sources = {BINDINGS_FLAG: Source([], [])}
    for file in files:
        path = find_gin_file(file, asked=f"--gin_file={file}")
        sources[BINDINGS_FLAG].includes.append(_read_file(path, sources, ()))
    for text in texts:
        for statement, origin in _statements(text, BINDINGS_FLAG):
            _add(statement, origin, BINDINGS_FLAG, Path(), sources, ())
    return sources


def _read_file(path: Path, sources: dict[str, Source], including: tuple[str, ...]) -> str:
    """Adds a file and the files that it includes to `sources`; returns its key."""
    key, shown = str(path.resolve()), shown_path(path)
    if key in including:
        circle = " includes ".join(shown_path(Path(file)) for file in (*including, key))
        raise ConfigError(f"{shown}: files include each other in a circle: {circle}")
    if key not in sources:
        try:
            text = untrusted.read_file(path, LARGEST_FILE).decode("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{shown} cannot be read: {error}") from error
        if len(including) > bindings.DEEPEST:
            raise ConfigError(f"{shown}: files include files more than {bindings.DEEPEST} deep")
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
    """Adds a statement to the source `key`; an included file is added to `sources`."""
    match statement:
        case config_parser.BindingStatement():
            sources[key].bindings.append(_binding(statement, origin))
        case config_parser.IncludeStatement(filename=file):
            asked = f"{origin}: include {file!r}"
            path = find_gin_file(file, asked=asked, beside=directory)
            sources[key].includes.append(_read_file(path, sources, including))
        case config_parser.ImportStatement():
            raise ConfigError(
                f"{origin}: {statement.format()!r} is refused; gin files are data here, and every "
                "setting of brt is known without an import"
            )
        case config_parser.BlockDeclaration():
            pass  # The bindings of the block follow as statements.


def _binding(statement: config_parser.BindingStatement, origin: str) -> Binding:
    name = ".".join(filter(None, (statement.selector, statement.arg_name)))
    if statement.scope:
        raise ConfigError(f"{origin}: {statement.scope}/{name} has a scope; bind {name} itself")
    return Binding(name, statement.value, origin)


class _Grammar(config_parser.ConfigParser):
    """Gin's grammar, with limits, and without dictionaries that contain a key twice."""

    _keys: set[Any] = set()
    _depth = _strings = 0  # number of open brackets, and of adjacent strings

    def _advance_one_token(self) -> None:
        super()._advance_one_token()  # This takes quadratic time in the number of adjacent strings.
        kind = self._current_token.type
        self._strings = (self._strings + (kind == tokenize.STRING)) * (kind in _BETWEEN)
        if self._strings > bindings.MOST_STRINGS:
            self._raise_syntax_error(f"more than {bindings.MOST_STRINGS} strings side by side")

    def _maybe_parse_container(self) -> tuple[bool, Any]:
        outer, self._keys, self._depth = self._keys, set(), self._depth + 1
        if self._depth > bindings.DEEPEST:
            self._raise_syntax_error(f"brackets are nested more than {bindings.DEEPEST} deep")
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
    """Represents %NAME as Macro, and records @name, which `_statements` refuses."""

    def __init__(self) -> None:
        self.references: list[str] = []

    def configurable_reference(self, name: str, evaluate: bool) -> None:
        self.references.append(f"@{name}{'()' if evaluate else ''}")

    def macro(self, name: str) -> Macro:
        return Macro(name)


def _statements(text: str, shown: str) -> Iterator[tuple[Any, str]]:
    """Yields the statements of a text, each with its origin."""

    def origin(line: int | None) -> str:
        return f"{shown}:{line}" if line and shown != BINDINGS_FLAG else shown

    if (nul := text.find("\0")) >= 0:  # Python's tokenizer does not report this clearly.
        place = origin(text.count("\n", 0, nul) + 1)
        raise ConfigError(f"{place}: there is a NUL, which no setting has; write the file anew")
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
            f"{origin(error.lineno)}: {bindings.unreadable(error.msg, error.text)}"
        ) from error
    except (tokenize.TokenError, TypeError) as error:  # TypeError: a list as a dictionary's key
        raise ConfigError(
            f"{origin(None)}: {bindings.unreadable(str(error.args[0]), None)}"
        ) from error
