"""A rule-based sentence splitter, which needs no downloads.

A sentence ends after `.`, `!`, `?` or `…` and any closing quotes and brackets behind the mark, if
white space and a word follow and the word does not begin with a lower-case letter. Opening quotes
and brackets may precede the word. A single period does not end a sentence

* after a title (Mr. Darcy) or an abbreviation within a sentence (e.g. Kansas, Yankees vs. Mets);
* after an abbreviation before a number (Fig. 3, No. 10, Dec. 24);
* after an initial (J. Austen) or an abbreviation that may end a sentence (Inc., etc., U.S.,
  p.m.), unless the next word often starts a sentence (The, He, In, ...);
* within a number or a name (3.5, v1.2, example.com), where no white space follows.

A period that stands alone between spaces, as in tokenised corpora, always ends a sentence, and so
does a line break.
"""

import re

_TITLES = frozenset(
    "Adm Brig Capt Cmdr Col Cpl Dr Fr Gen Gov Hon Lt Maj Messrs Mlle Mme Mr Mrs Ms Mt Prof Rep "
    "Reps Rev Sen Sens Sgt".split()
)
_WITHIN = frozenset("approx cf e.g i.e viz vs".split())
_NUMBERED = frozenset(
    "art ch eq eqs fig figs no nos nr p pp pt ref refs sec sect secs tab vol vols "
    "jan feb mar apr jun jul aug sep sept oct nov dec".split()
)
_PERHAPS = frozenset("al bros co corp dept etc inc jr llc ltd mfg ph.d plc sr st".split())
_STARTERS = frozenset(
    "a after all also although an and as at because before both but by during each finally first "
    "for from he her here his how however i if in it its many more most my no not now of on one "
    "or other our she since so some such that the their then there these they this those though "
    "to two under until we what when where which while who why with yet you your".split()
)
_CLOSING, _OPENING = "\"'”’»)\\]", "\"'“‘«(\\["
_MARK = re.compile(rf"([.!?…]+)[{_CLOSING}]*\s+(?=[{_OPENING}]*(\w+))")
_ALONE = re.compile(r"(?<=\s)\.\s+")
# _BEFORE matches the word before a period; the word may contain periods. _DOTTED matches single
# letters with periods between them, which are an initial (J) or an abbreviation (U.S or p.m).
_BEFORE = re.compile(r"[^\W\d_](?:[\w.]*\w)?$")
_DOTTED = re.compile(r"(?:[^\W\d_]\.)*[^\W\d_]")


def sentences(text: str) -> list[str]:
    """Returns the sentences of a text in order, by the rules in the docstring of this module.

    White space around sentences is removed, and empty sentences are left out.
    """
    parts = []
    for line in text.split("\n"):
        alone = {match.end() for match in _ALONE.finditer(line)}
        ends = {match.end() for match in _MARK.finditer(line) if _is_end(line, match)}
        borders = [0, *sorted(alone | ends), len(line)]
        parts += [line[a:b].strip() for a, b in zip(borders, borders[1:], strict=False)]
    return [sentence for sentence in parts if sentence]


def _is_end(line: str, match: re.Match[str]) -> bool:
    mark, following = match.groups()
    if following[0].islower():
        return False
    word = _BEFORE.search(line, max(match.start() - 40, 0), match.start())
    if mark != "." or not word:
        return True  # Only a single period after a word can belong to an abbreviation.
    before = word[0]
    if before in _TITLES or before.lower() in _WITHIN:
        return False
    if before.lower() in _NUMBERED and any(letter.isdigit() for letter in following):
        return False
    initial = len(before) == 1 and before != "I"
    if initial or before.lower() in _PERHAPS or len(before) > 1 and _DOTTED.fullmatch(before):
        # A single letter after an initial is probably another initial (J. A. Smith) and not the
        # first word of a sentence, even if the letter is a word such as A.
        return following.lower() in _STARTERS and (len(following) > 1 or not initial)
    return True
