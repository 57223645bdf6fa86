"""Passwords and keys do not go into what a run writes down."""

import re
from typing import TypeVar, cast

HIDDEN = "***"
_NAME = r"[\w.-]*(?:token|secret|passw(?:or)?d|api_?key|access_?key|signature|credentials?)"
_PATTERNS = [
    (r"(?<=://)[^/@\s'\"]+(?=@)", HIDDEN),  # https://user:password@host
    (rf"(?i)([?&;]{_NAME}=)[^&;#\s'\")]+", rf"\1{HIDDEN}"),  # https://host/?token=...
    (rf"(?i)^(-*{_NAME}=).+", rf"\1{HIDDEN}"),  # an argument, a variable
    (
        r"\b(?:hf_|gh[opsu]_|github_pat_|glpat-|sk-|xox[bp]-|wandb_v1_|AKIA)[\w-]{16,}",
        HIDDEN,
    ),  # as those who give keys away have them begin
]  # fmt: skip
_COMPILED = [(re.compile(pattern), by) for pattern, by in _PATTERNS]
_REDACTED = re.compile(r"://\*\*\*@|=\*\*\*|^\*\*\*$")
T = TypeVar("T")


def redacted(value: T) -> T:
    """The same JSON, or tuples of it, with *** for what looks like a secret in its texts."""
    found: object = value
    if isinstance(value, str):
        for pattern, by in _COMPILED:
            found = pattern.sub(by, cast(str, found))
    elif isinstance(value, dict):
        found = {key: redacted(item) for key, item in value.items()}
    elif isinstance(value, list | tuple):
        found = type(value)(map(redacted, value))
    return cast(T, found)


def lacks_secret(value: object) -> bool:
    """Whether a text, or one of several, was redacted."""
    if isinstance(value, list | tuple):
        return any(map(lacks_secret, value))
    return isinstance(value, str) and bool(_REDACTED.search(value))
