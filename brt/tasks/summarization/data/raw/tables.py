"""One's own pairs, from any source that training reads."""

from brt.data.rows.tally import BadRow
from brt.tasks.summarization.data.columns import Pair
from brt.tasks.summarization.data.raw.examples import Example


def example(pair: Pair | BadRow) -> Example | BadRow:
    """The features document, summary, id; the row, which nothing else shares, is the key."""
    if isinstance(pair, BadRow):
        return pair
    return Example(
        pair.name, pair.name, {"document": pair.source, "summary": pair.target, "id": pair.id}
    )
