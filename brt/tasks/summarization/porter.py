"""Porter's stemmer with the extensions of NLTK, which ROUGE scorers in Python use.

M. F. Porter, "An algorithm for suffix stripping", Program 14 (1980) 130-137. A word has the form
[C](VC)^m[V], where C and V are sequences of consonants and of vowels; the number m is called the
measure of the word. A rule replaces a suffix if the measure of the letters before the suffix is
large enough. NLTK adds irregular words, rules for short words (died -> die) and for y after a
consonant (cry -> cri, enjoy -> enjoy), and the suffixes -fulli and -logi.
"""

from collections.abc import Callable
from functools import lru_cache

_IRREGULAR = {
    "skies": "sky", "sky": "sky", "dying": "die", "lying": "lie", "tying": "tie", "news": "news",
    "innings": "inning", "inning": "inning", "outings": "outing", "outing": "outing",
    "cannings": "canning", "canning": "canning", "howe": "howe", "proceed": "proceed",
    "exceed": "exceed", "succeed": "succeed",
}  # fmt: skip

# The tables map the suffixes of steps 2 to 4 of the algorithm to their replacements. In each step,
# only the first suffix in the table with which the word ends is tried.
_STEP_2 = {
    "ational": "ate", "tional": "tion", "enci": "ence", "anci": "ance", "izer": "ize",
    "bli": "ble", "alli": "al", "entli": "ent", "eli": "e", "ousli": "ous", "ization": "ize",
    "ation": "ate", "ator": "ate", "alism": "al", "iveness": "ive", "fulness": "ful",
    "ousness": "ous", "aliti": "al", "iviti": "ive", "biliti": "ble", "fulli": "ful",
}  # fmt: skip
_STEP_3 = {
    "icate": "ic", "ative": "", "alize": "al", "iciti": "ic", "ical": "ic", "ful": "", "ness": "",
}  # fmt: skip
_STEP_4 = dict.fromkeys(
    ("al", "ance", "ence", "er", "ic", "able", "ible", "ant", "ement", "ment", "ent", "ion", "ou",
     "ism", "ate", "iti", "ous", "ive", "ize"), "",
)  # fmt: skip


@lru_cache(maxsize=1 << 16)
def stem(word: str) -> str:
    """Returns the stem of a word in lower case; words of one or two letters are unchanged."""
    if word in _IRREGULAR or len(word) <= 2:
        return _IRREGULAR.get(word, word)
    word = _without_y(_without_past(_without_plural(word)))
    word = _step_2(word)
    word = _replaced(word, _STEP_3, _leaves_something)
    word = _replaced(word, _STEP_4, _leaves_enough)
    word = _without_e(word)
    return word[:-1] if word.endswith("ll") and _measure(word[:-1]) > 1 else word


def _shape(word: str) -> str:
    """Returns `c` for every consonant and `v` for every vowel; y is a vowel after a consonant."""
    shape = ""
    for letter in word:
        vowel = letter in "aeiou" or letter == "y" and shape.endswith("c")
        shape += "v" if vowel else "c"
    return shape


def _measure(word: str) -> int:
    return _shape(word).count("vc")


def _ends_in_cvc(word: str) -> bool:
    """Returns True for words like hop, but not for how, box, toy; also for words of the form VC."""
    shape = _shape(word)
    return shape == "vc" or shape.endswith("cvc") and word[-1] not in "wxy"


def _replaced(word: str, rules: dict[str, str], allowed: Callable[[str, str], bool]) -> str:
    for suffix, new in rules.items():
        if word.endswith(suffix):
            rest = word.removesuffix(suffix)
            return rest + new if allowed(rest, suffix) else word
    return word


def _without_plural(word: str) -> str:
    """Step 1a of the algorithm."""
    if word.endswith("ies"):
        return word[:-1] if len(word) == 4 else word[:-2]
    if word.endswith("sses"):
        return word[:-2]
    return word[:-1] if word.endswith("s") and not word.endswith("ss") else word


def _without_past(word: str) -> str:
    """Step 1b of the algorithm."""
    if word.endswith("ied"):
        return word[:-1] if len(word) == 4 else word[:-2]
    if word.endswith("eed"):
        return word[:-1] if _measure(word[:-3]) > 0 else word
    for suffix in ("ed", "ing"):
        rest = word.removesuffix(suffix)
        if rest != word and "v" in _shape(rest):
            break
    else:
        return word
    if rest.endswith(("at", "bl", "iz")):
        return rest + "e"
    if len(rest) > 1 and rest[-1] == rest[-2] and _shape(rest)[-1] == "c":
        return rest if rest[-1] in "lsz" else rest[:-1]
    return rest + "e" if _measure(rest) == 1 and _ends_in_cvc(rest) else rest


def _without_y(word: str) -> str:
    """Step 1c of the algorithm."""
    rest = word[:-1]
    return rest + "i" if word[-1] == "y" and len(rest) > 1 and _shape(rest)[-1] == "c" else word


def _step_2(word: str) -> str:
    if word.endswith("alli") and _measure(word[:-4]) > 0:
        return _step_2(word[:-2])
    if word.endswith("logi"):
        # The l of the suffix -logi counts as a letter of the stem. Otherwise the stem of geologi
        # would be geo, whose measure 0 is too small.
        return word[:-1] if _measure(word[:-3]) > 0 else word
    return _replaced(word, _STEP_2, _leaves_something)


def _leaves_something(rest: str, _: str) -> bool:
    return _measure(rest) > 0


def _leaves_enough(rest: str, suffix: str) -> bool:
    return _measure(rest) > 1 and (suffix != "ion" or rest[-1] in "st")


def _without_e(word: str) -> str:
    """Step 5a of the algorithm."""
    rest = word[:-1]
    if not word.endswith("e") or _measure(rest) == 0:
        return word
    return word if _measure(rest) == 1 and _ends_in_cvc(rest) else rest
