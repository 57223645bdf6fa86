import pytest

from brt.tasks.summarization.rouge import sentences

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
