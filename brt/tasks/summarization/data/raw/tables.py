"""Converts pairs of document and summary from tables to examples of a TensorFlow dataset."""

from brt.data.rows.tally import BadRow
from brt.tasks.summarization.data.columns import Pair
from brt.tasks.summarization.data.raw.examples import Example


def example(pair: Pair | BadRow) -> Example | BadRow:
    """Returns a pair as an example, whose key is the name of the row, which is unique."""
    if isinstance(pair, BadRow):
        return pair
    return Example(
        pair.name, pair.name, {"document": pair.source, "summary": pair.target, "id": pair.id}
    )
