"""Stop strings, found without decoding every row at every token: only the tail of rows that drew a
token which may end one is decoded."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Decode = Callable[[Sequence[int]], str]  # Token ids to text, special tokens kept


@dataclass(eq=False)
class TokenTexts:
    """Texts of single tokens, for all stop strings of an engine; each is decoded once."""

    decode: Decode
    vocabulary: int
    _known: dict[int, str] = field(default_factory=dict)

    def may_end(self, token: int, stops: tuple[str, ...]) -> bool:
        """True if ``token`` may end one of the stop strings: its text has the string's last
        character, or its text alone is empty or has part of a character."""
        if (text := self._known.get(token)) is None:
            text = self._known[token] = self.decode([token])
        if not text or "\ufffd" in text:
            return True
        # Some tokenizers strip the space of a lone token.
        return any(stop[-1] in text or stop[-1].isspace() for stop in stops)


def ended_by(stops: tuple[str, ...], tokens: NDArray[np.int32], decode: Decode) -> str | None:
    """The stop string that the completion's newest token completed, the earliest if several."""
    # Only the tail is decoded. A token may carry no more than a byte of a character.
    tail = max(len(stop.encode()) for stop in stops) + 4
    text = decode(tokens[-tail:].tolist())
    hits = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    return min(hits)[1] if hits else None


def begun(stops: tuple[str, ...], tokens: NDArray[np.int32], decode: Decode) -> int:
    """Most tokens that may still complete a stop string that has begun in ``tokens``; 0: none
    has."""
    longest = max((len(stop.encode()) for stop in stops), default=0)
    text = decode(tokens[-longest - 4 :].tolist()) if longest else ""
    there = text.rstrip("\ufffd")  # Part of a character, which may be the stop string's next
    return max(
        (
            len(stop[length:].encode())
            for stop in stops
            for length in range(len(stop))
            if there.endswith(stop[:length]) and (length or there != text)
        ),
        default=0,
    )
