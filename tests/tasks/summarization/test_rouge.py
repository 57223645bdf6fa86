"""Tests that ROUGE scores equal those of the package rouge-score, and short cases by hand."""

import random
from collections.abc import Callable
from importlib.resources import files

import numpy as np
import pytest

from brt.errors import ConfigError, DataError
from brt.tasks.rouge import (
    PROTOCOLS,
    RougeProtocol,
    Score,
    aggregate,
    get_protocol,
    rouge_l_sum,
    sentences,
)

TOLERANCE = 1e-9
NAMES = ["rouge1", "rouge2", "rougeL", "rougeLsum"]
NOVELS = sorted((files("brt.data") / "corpora/novels").glob("*/*.txt"))
ODD = [
    ("", ""),
    ("", "a summary"),
    ("a reference", ""),
    ("...", "?!"),
    ("\n\n \n", "a\n\nb"),
    ("Straße und Über-Größe", "strasse und uber grosse"),
    ("東京は首都です", "東京は首都です"),
    ("İstanbul naïve ﬁx K9 x²", "istanbul naive fix k9 x2"),
    ("one", "one one one one"),
    ("a b c d e f g", "g f e d c b a"),
    ("skies dying news 1990s generalizations oscillators", "sky die new 1990 general oscillate"),
    ("police killed the gunman\nthe end", "the gunman\npolice killed the end killed"),
]


def by_lines(text: str) -> list[str]:
    return text.split("\n")


@pytest.fixture(scope="module")
def texts() -> list[tuple[str, str]]:
    """Returns references with predictions, as pairs.

    The references are paragraphs of novels, with shortened and shuffled predictions, and random
    words.
    """
    rng = random.Random(0)
    pairs = list(ODD)
    for novel in NOVELS:
        lines = [line for line in novel.read_text("utf-8").split("\n") if 80 < len(line) < 400]
        for _ in range(6):
            reference = rng.choice(lines).replace(". ", rng.choice([". ", ".\n", " . "]))
            words = reference.split(" ")
            kept = [w for w in words if rng.random() < 0.7] + rng.choice(lines).split(" ")[:12]
            if rng.random() < 0.3:
                rng.shuffle(kept)
            pairs.append((reference, " ".join(kept).replace("; ", ".\n")))
    for _ in range(100):
        draw = [rng.choices(["a", "b", "c", "dd", "\n"], k=rng.randrange(30)) for _ in range(2)]
        pairs.append(tuple(" ".join(words) for words in draw))
    return pairs


@pytest.fixture(scope="module")
def rouge_score() -> Callable:
    """Returns a function that scores a prediction with the package rouge-score."""
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer
    scorers = {stemmer: scorer(NAMES, use_stemmer=stemmer) for stemmer in (False, True)}
    return lambda stemmer, reference, prediction: scorers[stemmer].score(reference, prediction)


@pytest.mark.parametrize("stemmer", [False, True])
def test_scores_equal_rouge_score(
    texts: list[tuple[str, str]], rouge_score: Callable, stemmer: bool
) -> None:
    ours = RougeProtocol("lines", stemmer, by_lines, "at line breaks")
    sums = np.zeros(4)
    for reference, prediction in texts:
        expected = rouge_score(stemmer, reference, prediction)
        found = ours.score(reference, prediction)
        assert list(found) == NAMES
        for name in NAMES:
            np.testing.assert_allclose(found[name], expected[name], atol=TOLERANCE)
        sums += [found[name].f1 for name in NAMES]
    assert np.all(sums > 5)  # The comparison is not of zeros only.


def test_protocols_are_rouge_score_of_prepared_summaries(
    texts: list[tuple[str, str]], rouge_score: Callable
) -> None:
    hf, t5 = (PROTOCOLS[name] for name in ("hf", "t5"))
    for pair in texts[::2]:
        found = t5.score(*pair)
        expected = rouge_score(False, *(text.replace(" . ", " .\n") for text in pair))
        for name in NAMES:
            np.testing.assert_allclose(found[name], expected[name], atol=TOLERANCE)
        expected = rouge_score(True, *("\n".join(hf.split(text)) for text in pair))
        for name, score in hf.score(*pair).items():
            np.testing.assert_allclose(score, expected[name], atol=TOLERANCE)


def test_the_union_over_sentences_is_that_of_the_paper() -> None:
    # In Lin (2004), section 3.2, w1 w2 w3 w4 w5 is compared with w1 w2 w6 w7 w8 and
    # w1 w3 w8 w9 w5, and 4 of its 5 words are matched.
    score = rouge_l_sum(["12345"], ["12678", "13895"])
    assert score == pytest.approx((4 / 10, 4 / 5, 8 / 15))
    assert rouge_l_sum(["aa"], ["a"]) == pytest.approx((1.0, 1 / 2, 2 / 3))


def test_protocols_say_what_they_do() -> None:
    for name, protocol in PROTOCOLS.items():
        assert protocol.name == name and f"protocol {name}: " in protocol.text
    score = get_protocol("hf").score("Running dogs. Jumping cats.", "jump cat\nrun dog")
    assert score["rougeLsum"].f1 == 1.0 and score["rougeL"].f1 == 0.5
    assert get_protocol("t5").score("Running dogs.", "run dog")["rouge1"].f1 == 0.0
    with pytest.raises(ConfigError, match="no ROUGE protocol 'rouge'; there are hf, t5"):
        get_protocol("rouge")


def test_aggregates_are_means_with_an_interval_that_shrinks_as_it_should() -> None:
    rng = np.random.default_rng(0)
    for count in (50, 800):
        values = rng.uniform(size=(count, 3))
        documents = [{"rouge1": Score(*row), "rouge2": Score(0.5, 0.5, 0.5)} for row in values]
        found = aggregate(documents)
        assert found == aggregate(documents)  # The bootstrap's seed is fixed.
        means = [found["rouge1"][name] for name in ("precision", "recall", "f1")]
        np.testing.assert_allclose(means, 100 * values.mean(axis=0), atol=1e-10)
        f1 = 100 * values[:, 2]
        half = 1.96 * f1.std() / count**0.5
        np.testing.assert_allclose(found["rouge1"]["high"], f1.mean() + half, atol=0.15 * half)
        np.testing.assert_allclose(found["rouge1"]["low"], f1.mean() - half, atol=0.15 * half)
        assert found["rouge2"]["low"] == found["rouge2"]["high"] == 50
    with pytest.raises(DataError, match="no summaries to score: the split has no documents"):
        aggregate([])


# Each text is a list of the sentences into which it must be split.
SPLIT = [
    ["It rained.", "We left."],
    ["Really?", "Yes!", "Good…", "Then go."],
    ["Mr. Bennet and Mrs. Bennet met Dr. Who at St. James's.", "He smiled."],
    ["It grew by 3.5 percent, to 1.2.3.", "40 others did not."],
    ["J. R. R. Tolkien met C. S. Lewis.", "They talked."],
    ["J. A. Smith wrote to U. S. Grant.", "Nobody answered."],
    ["She works at Acme Inc. in Ohio.", "He moved to the U.S.", "Then he came back."],
    ["The U.S. Senate met at 5 p.m.", "It voted at 6 p.m. Eastern time."],
    [
        "Fruit, e.g. Apples, is good, i.e. Healthy.",
        "So are nuts, cakes, etc.",
        "But not salt.",
    ],
    ['He said: "No."', "Then he left.", '"Why?"', "(Nobody knew.)", '"Go!"', "Off he went."],
    ["“I am,” she said.", "“You are not.”", "‘Quite.’", "«Oui.»", "Done."],
    ["See Fig. 3 and No. 10 of Dec. 24.", "He said no.", "They met in Dec.", "We did not."],
    ["as shown by Smith et al. Jones differs, Brown et al.", "This is new."],
    ["It was I.", "You were not."],
    ["Visit example.com.", "Or not...", "He waited... and waited."],
    [
        "Versions v1.2 and 2.0 differ.",
        "Élan is a word. the small letter joins. “so does this.”",
    ],
    ["Plan B.", "The other one.", "Vitamin C helps."],
    ["one two .", "three four .", "five"],
    ["A period at the end of a line."],
]


@pytest.mark.parametrize("expected", SPLIT, ids=lambda found: found[0])
def test_sentences_are_split_whatever_the_white_space(expected: list[str]) -> None:
    assert sentences(" ".join(expected)) == expected
    wide = [sentence.replace(" ", "  ") for sentence in expected]
    assert sentences("\n " + "\t  ".join(wide) + " \n\n") == wide


def test_lines_are_split_first_and_nothing_else_is_lost() -> None:
    assert sentences("no end\nMr.\nBennet. He left\n\n") == ["no end", "Mr.", "Bennet.", "He left"]
    assert sentences("") == sentences(" \n \n") == []
    text = " ".join(sentence for found in SPLIT for sentence in found)
    assert "".join(sentences(text)).replace(" ", "") == text.replace(" ", "")
