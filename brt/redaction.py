"""Removes passwords and keys from everything that a run writes.

A secret is recognised by its place (a password in a URL, the value of a flag with a telling name),
by the prefix that a service gives its keys, or by its form: long, with letters and digits in
random order, and not part of a path. Hashes, numbers and names that people choose stay readable.
"""

import re
from typing import TypeVar, cast

HIDDEN = "***"
# If the name of a value ends with one of the words in _SECRET, the value is always secret.
_SECRET = (
    r"(?:token|secret|passw(?:or)?d|passphrase|api_?key|access_?key|secret_?key|private_?key|"
    r"signature|credentials?|authorization)"
)
# If the name of a value is one of the words in _PERHAPS, or ends with one of them after "_", "." or
# "-", the value is secret unless _PLAIN excludes it: a short number, a truth value, a path, "none"
# or "auto".
_PERHAPS = r"(?:key|auth|sig|pass|pwd|cookie)"
_PLAIN = r"(?!(?:true|false|none|auto|[-+.\d]{1,12}|\.{0,2}/[^&;\s'\"]*)(?:[&;#\s'\")]|$))"
_VALUE = r"[^&;#\s'\")]+"
_SERVICES = (
    r"hf_[A-Za-z0-9]{28,}|gh[opsur]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|"
    r"gl(?:pat|rt|cbt|dt|ptt|ft|soat|agent|imt|oas)-[\w.-]{16,}|sk-(?:ant|proj|svcacct|or)-[\w-]{16,}|"
    r"sk-[A-Za-z0-9]{20,}|[srp]k_(?:live|test)_[A-Za-z0-9]{10,}|xox[a-z]-[\w-]{10,}|xapp-[\w-]{10,}|"
    r"wandb_v1_\w{16,}|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{40,}|dop_v1_[0-9a-f]{32,}|ya29\.[\w-]{16,}|"
    r"AIza[\w-]{20,}|A(?:KI|SI)A[A-Z0-9]{12,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"
)
_PORT = r"(?![^/@\s'\"?#:]*:\d{1,5}(?:/|$))"
_PATTERNS = [
    # In https://user:password@host, a password may itself contain @. The pattern therefore hides
    # everything from the colon to the last @ that is followed by a character with which the name of
    # a host can begin.
    (rf"(?<=://){_PORT}[^/@\s'\"?#:]*:(?:(?!://)[^\s'\"])*(?=@[\w.\[-])", HIDDEN),
    (r"(?<=://)[^/@\s'\"]+(?=@)", HIDDEN),
    # This pattern hides secrets in queries, as in https://host/?token=...
    (rf"(?i)([?&;](?:[\w.-]*?){_SECRET}=){_VALUE}", rf"\1{HIDDEN}"),
    (rf"(?i)(://[^\s'\"]*?[?&;](?:[\w.-]*[_.-])?{_PERHAPS}=){_PLAIN}{_VALUE}", rf"\1{HIDDEN}"),
    # This pattern hides the value of an environment variable.
    (rf"(?i)^(-*[\w.-]*{_SECRET}=).+", rf"\1{HIDDEN}"),
    # The next two patterns hide the values of flags, as in --api_key=... or --token ...
    (rf"(?i)(?<!\S)(--?[\w.-]*{_SECRET}[= ]){_VALUE}", rf"\1{HIDDEN}"),
    (rf"(?i)(?<!\S)(--?(?:[\w.-]*[_.-])?{_PERHAPS}[= ]){_PLAIN}{_VALUE}", rf"\1{HIDDEN}"),
    (r"(?i)\b(bearer[ +:]+|authorization: *\w+ +)(?=\S*\d)[\w.~+/=-]{8,}", rf"\1{HIDDEN}"),
    (rf"(?<![A-Za-z0-9])(?=[\w.-]*\d)(?:{_SERVICES})", HIDDEN),
]  # fmt: skip
_COMPILED = [(re.compile(pattern), by) for pattern, by in _PATTERNS]
_WORD = re.compile(
    r"(?<![\w/\\.@+-])[A-Za-z0-9_-]{24,}(?![\w/\\@+-]|\.\w)"
    r"|(?<=/)(?<=\w/)[A-Za-z0-9_-]{24,}(?![\w/\\@+.-])"
    r"|(?<![\w/\\.@+-])(?=[\w/-]*\+|[\w/+-]+=)[A-Za-z0-9+/_-]{36,}={0,2}(?![\w/\\@+-]|\.\w)"
)
_HASH = re.compile(
    r"(?i)(?:commit|rev(?:ision)?|sha\d*|hash|git|tree|md5|fingerprint|digest)\W{0,4}$"
)
_FLAG = re.compile(rf"(?i)--?(?:[\w.-]*{_SECRET}|(?:[\w.-]*[_.-])?{_PERHAPS})")
_REDACTED = re.compile(r"(?<![\w*/])\*\*\*(?![\w*/])|://\*\*\*@|://[^\s'\"]*/\*\*\*(?![\w*/])")
T = TypeVar("T")


def redacted(value: T) -> T:
    """Returns a value in which *** replaces everything that looks like a secret.

    The value is JSON, but may contain tuples. In a list or tuple, the text that follows a flag with
    a telling name (such as --token) is replaced, too.
    """
    result: object = value
    if isinstance(value, str):
        for pattern, by in _COMPILED:
            result = pattern.sub(by, cast(str, result))
        result = _WORD.sub(_without_random, cast(str, result))
    elif isinstance(value, dict):
        result = {key: redacted(item) for key, item in value.items()}
    elif isinstance(value, list | tuple):
        items = [redacted(item) for item in value]
        for place, (flag, text) in enumerate(zip(value, value[1:], strict=False), start=1):
            texts = isinstance(flag, str) and isinstance(text, str)
            if texts and _FLAG.fullmatch(flag) and not text.startswith("-"):
                items[place] = HIDDEN
        result = type(value)(items)
    return cast(T, result)


def lacks_secret(value: object) -> bool:
    """Returns True if `redacted` has replaced a secret in a text, or in one of several texts."""
    if isinstance(value, list | tuple):
        return any(map(lacks_secret, value))
    return isinstance(value, str) and bool(_REDACTED.search(value))


def _without_random(match: re.Match) -> str:
    """Returns *** for a word of random characters, but keeps a hash after a word such as `sha`."""
    word, before = match[0], match.string[: match.start()]
    if before.endswith("/") and not re.search(r"https?://[^\s'\"]*$", before):
        return word  # The word is a part of a path, and such words are kept.
    return HIDDEN if _random(word) and not _HASH.search(before) else word


def _random(word: str) -> bool:
    """Returns True if letters and digits alternate as often as in keys, unlike in words.

    Hexadecimal words are keys only if they have the length of keys of Weights & Biases, because
    hexadecimal words of other lengths are hashes.
    """
    text = re.sub(r"[^A-Za-z0-9]", "", word)
    kinds = ["0" if c.isdigit() else "a" if c.islower() else "A" for c in text]
    changes = sum(a != b for a, b in zip(kinds, kinds[1:], strict=False)) / len(text)
    letters = 1 - kinds.count("0") / len(text)
    if re.fullmatch(r"[0-9a-f]+", word.lower()):
        return len(word) == 40 and 0 < letters < 1
    if {*kinds} == {"0", "a", "A"}:
        return len(text) >= 20 and changes >= 0.38 and letters >= 0.6
    long = len(text) >= 32 and "0" in kinds
    return long and changes >= 0.2 and letters >= 0.5
