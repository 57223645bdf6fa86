"""Stop strings, at which a generated text ends."""

from collections.abc import Sequence


class StopFilter:
    """Ends a text, which it takes in pieces, before the first stop string that is complete.

    Of several stop strings that are complete at the same character, the longest counts. The result
    does not depend on how the text is divided into pieces. No stop string is empty. `found` is True
    once the text has ended at one.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops, self._held, self.found = tuple(stops), "", False

    def add(self, piece: str, *, final: bool = False) -> str:
        """Takes the next piece, and returns the text that no stop string can contain any more."""
        text = self._held + piece
        places = [(text.find(stop) + len(stop), -len(stop)) for stop in self._stops if stop in text]
        if places:
            self.found = True
            return text[: sum(min(places))]
        held = 0 if final else max((_overlap(text, stop) for stop in self._stops), default=0)
        cut = len(text) - held
        self._held = text[cut:]
        return text[:cut]


def _overlap(text: str, stop: str) -> int:
    """Returns how many characters at the end of `text` are the beginning of `stop`."""
    return next((n for n in range(len(stop) - 1, 0, -1) if text.endswith(stop[:n])), 0)
