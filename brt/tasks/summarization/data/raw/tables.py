"""The user's own pairs, from any source that training reads."""

from brt.data.rows.tally import BadRow
from brt.tasks.summarization.data.columns import Pair
from brt.tasks.summarization.data.raw.examples import Example


def example(pair: Pair | BadRow) -> Example | BadRow:
    """Returns the features document, summary and id; the key is the row's name, which is unique."""
    if isinstance(pair, BadRow):
        return pair
    return Example(
        pair.name, pair.name, {"document": pair.source, "summary": pair.target, "id": pair.id}
    )
