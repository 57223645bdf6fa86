"""Renders conversations with the chat template of a tokenizer, and encodes them.

A template is a program in the language Jinja, which anybody may have written. It runs in Jinja's
sandbox and in a child process, with limited memory and time. It has the variables and filters that
`apply_chat_template` of transformers 5 gives to a template. The texts and ids are those that this
function returns with `sanitize_control_tokens`: names of special tokens in messages are encoded
as text.
"""

import datetime
import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from brt import bounded, untrusted
from brt.data import plain_text, special_tokens
from brt.errors import DataError

if TYPE_CHECKING:
    import jinja2

    from brt.data.tokenizers import Tokenizer

ASSISTANT = "assistant"  # The role whose messages are answers.
_SECONDS = 10
# A rendered conversation has at most this many times the characters of its messages and template.
_GROWTH = 64
# Two characters of this range mark names of special tokens. Unicode has no characters for texts in
# this range.
_MARKS = range(0xFDD0, 0xFDF0)
_FILE, _CONFIG, _OLD_FILE = "chat_template.jinja", "tokenizer_config.json", "chat_template.json"
_VARIABLES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_REMEDY = "use a model for chats, or give the whole text as a prompt"


def render(tokenizer: "Tokenizer", messages: Any, *, add_generation_prompt: bool = True) -> str:
    """Returns the text of a conversation, a list of {"role": ..., "content": ...}.

    With `add_generation_prompt`, the text ends with the beginning of the assistant's turn. Raises
    DataError if there is no template, if the messages are not valid, or if the template refuses
    them or takes too much time or memory.
    """
    return _render(tokenizer, checked(messages), add_generation_prompt)


def encode(
    tokenizer: "Tokenizer", messages: Any, *, add_generation_prompt: bool = True
) -> np.ndarray:
    """Returns the ids, int32 [T], of the text that `render` returns.

    A BOS at its start is left out, because every document of brt begins with one.
    """
    marked, marks = _marked(tokenizer, checked(messages))
    parts = _parts(tokenizer, _render(tokenizer, marked, add_generation_prompt), marks)
    parts = parts[parts[:1] == [tokenizer.bos_id] :]
    ids = [tokenizer.encode(part) if isinstance(part, str) else [part] for part in parts]
    return np.concatenate([np.zeros(0, np.int32), *ids]).astype(np.int32)


def answers(tokenizer: "Tokenizer", messages: Any) -> list[tuple[str | int, bool]]:
    """Returns the parts of a conversation up to its last answer.

    A part is a text or the id of a special token. The bool beside a part is True if the assistant
    says the part. An answer includes the special token that ends the answer, but no
    white space after this token. Raises DataError as `render` does, and also if the template writes
    an answer in another way when further messages follow.
    """
    messages = checked(messages)
    marked, marks = _marked(tokenizer, messages)
    whole, place, found = _render(tokenizer, marked, False), 0, list[tuple[str | int, bool]]()
    for i, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        before = _render(tokenizer, marked[:i], True)
        after = _render(tokenizer, marked[: i + 1], False)
        if not (whole.startswith(after) and after.startswith(before) and len(before) >= place):
            raise DataError(
                f"the chat template of {tokenizer.name} writes message {i} in another way when "
                "others follow; divide the conversation, so that each has one answer, its last"
            )
        found += [(part, False) for part in _parts(tokenizer, whole[place : len(before)], marks)]
        answer = _parts(tokenizer, after[len(before) :], marks)
        *_, last = [-1, *(n for n, part in enumerate(answer) if isinstance(part, int))]
        blank = last >= 0 and not "".join(map(str, answer[last + 1 :])).strip()
        found += [(part, not blank or n <= last) for n, part in enumerate(answer)]
        place = len(after)
    while found and not found[-1][1]:
        found.pop()
    return found[bool(found) and found[0][0] == tokenizer.bos_id :]


def fingerprint(tokenizer: "Tokenizer") -> str:
    """Returns the SHA-256 of a tokenizer's chat template and of the template's variables."""
    return hashlib.sha256(json.dumps(_template(tokenizer)).encode()).hexdigest()


def checked(messages: Any) -> list[dict[str, str]]:
    """Returns messages with nothing but the texts "role" and "content".

    Raises DataError if a message lacks one of the two, or has another entry that is not None.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise DataError(
            "a conversation must be a list of {'role': 'user', 'content': 'TEXT'}, and not "
            f"{messages!r:.40}"
        )
    found = []
    for number, message in enumerate(messages):
        name = f"message {number} of the conversation"
        if not isinstance(message, Mapping):
            raise DataError(f"{name} is {message!r:.40}, and not an object with role and content")
        given = {key: value for key, value in message.items() if value is not None}
        if unread := sorted(given.keys() - {"role", "content"}):
            raise DataError(f"{name} has {unread[0]!r}, which brt does not read; leave it out")
        for key in ("role", "content"):
            if not isinstance(given.get(key), str):
                raise DataError(f"{name} has no text as its {key}; give one")
        found.append({key: plain_text.checked(name, text) for key, text in given.items()})
    return found


def _names(tokenizer: "Tokenizer") -> re.Pattern[str]:
    """Returns a pattern of the names of all special tokens."""
    names = sorted(tokenizer.special_ids, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, names)) or "(?!)")


def _marked(
    tokenizer: "Tokenizer", messages: list[dict[str, str]]
) -> tuple[list[dict[str, str]], tuple[str, str]]:
    """Marks the names of special tokens in messages.

    Returns the messages with one character before each name and another one after it, and these two
    characters, which do not occur in the original messages.
    """
    text = json.dumps(messages, ensure_ascii=False)
    free = [chr(code) for code in _MARKS if chr(code) not in text]
    if len(free) < 2:
        raise DataError(
            f"the conversation has all characters from U+{_MARKS[0]:X} to U+{_MARKS[-1]:X}, which "
            "stand for no text; remove them"
        )
    begin, end, *_ = free
    mark = functools.partial(_names(tokenizer).sub, f"{begin}\\g<0>{end}")
    return [{key: mark(text) for key, text in each.items()} for each in messages], (begin, end)


def _parts(tokenizer: "Tokenizer", text: str, marks: tuple[str, str]) -> list[str | int]:
    """Returns the texts and special ids in a rendered text that has the `marks` of `_marked`."""
    names, (begin, end) = _names(tokenizer).pattern, marks
    # A marked name is divided after its first character, so that it is no special token.
    text = re.sub(f"{begin}({names}){end}", lambda name: name[1][0] + begin + name[1][1:], text)
    found: list[str | int] = []
    for i, part in enumerate(re.split(f"({names})", text)):
        if i % 2:
            found.append(tokenizer.special_ids[part])
        else:
            found += filter(None, re.split(f"[{begin}{end}]", part))
    return found


def _render(tokenizer: "Tokenizer", messages: list[dict[str, str]], more: bool) -> str:
    template, variables = _template(tokenizer)
    request = json.dumps(
        [template, {"messages": messages, "add_generation_prompt": more, **variables}]
    )
    try:
        answer = json.loads(_worker().ask(request.encode()))
    except bounded.Refused as problem:
        answer = {"problem": str(problem)}
    if "problem" in answer:
        raise DataError(
            f"the chat template of {tokenizer.name} cannot write the conversation: "
            f"{answer['problem']}; change the conversation, or {_REMEDY}"
        )
    return answer["text"]


@functools.cache
def _worker() -> bounded.Worker:
    return bounded.Worker(__name__, seconds=_SECONDS)


def _template(tokenizer: "Tokenizer") -> tuple[str, dict[str, Any]]:
    """Returns a tokenizer's chat template, and the variables that are the same for all messages."""
    files = tokenizer.beside
    try:
        config = untrusted.checked_json(files.get(_CONFIG, b"{}"), {})
        old = untrusted.checked_json(files.get(_OLD_FILE, b"{}"), {})
        if _FILE in files:
            found = files[_FILE].decode("utf-8")
        else:
            found = config.get("chat_template") or old.get("chat_template")
        if isinstance(found, list):  # The file may have several templates with names.
            untrusted.check(found, [{"name": str, "template": str}], "chat_template")
            found = {each["name"]: each["template"] for each in found}.get("default")
        untrusted.check(found, str | None, "chat_template")
    except ValueError as error:
        raise DataError(f"the chat template of {tokenizer.name} is damaged: {error}") from error
    if not found:
        raise DataError(f"the tokenizer {tokenizer.name} has no chat template; {_REMEDY}")
    return found, {"tools": None, "documents": None, **special_tokens.named(files, _VARIABLES)}


def _answer(request: bytes) -> bytes:
    """Renders a conversation in the child process; returns its text, or a problem, as JSON."""
    template, variables = json.loads(request)
    parts, free = list[str](), _GROWTH * (len(request) + (1 << 10))
    try:
        for part in _compiled(template).generate(**variables):
            parts.append(part)
            if (free := free - len(part)) < 0:
                raise ValueError("it makes the text too long")
        answer = {"text": "".join(parts)}
    except MemoryError:
        raise
    except Exception as error:  # Expressions in a template can raise any error.
        answer = {"problem": f"{error}"[:300] or type(error).__name__}
    return json.dumps(answer).encode()


@functools.lru_cache(4)
def _compiled(template: str) -> "jinja2.Template":
    """Compiles a template in a Jinja environment like that of the library transformers."""
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """Ignores the tags {% generation %}, with which templates mark what the assistant says."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json  # Jinja's own filter escapes the characters of HTML.
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(template)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None,
    sort_keys: bool = False,
) -> str:  # fmt: skip
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)  # fmt: skip


def _raise(message: str) -> None:
    raise ValueError(message)


if __name__ == "__main__":
    bounded.answer(_answer)
