"""Stop strings, found without decoding every token of every row. A table over the vocabulary marks
the tokens that may end a stop string. Only rows that drew such a token are decoded, and only their
tail."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Decode = Callable[[Sequence[int]], str]  # Token ids to text, special tokens kept


@dataclass(eq=False)
class TokenTexts:
    """Characters of each token, for all stop strings of an engine. Every token of the vocabulary is
    decoded once, which takes seconds for a large vocabulary."""

    decode: Decode
    vocabulary: int
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _unclear: NDArray[np.int32] | None = None
    """Tokens whose text alone is empty or contains part of a character."""
    _having: dict[str, NDArray[np.int32]] = field(default_factory=dict)

    def build(self) -> None:
        """Idempotent."""
        with self._lock:
            if self._unclear is not None:
                return
            unclear: list[int] = []
            having: dict[str, list[int]] = {}
            for token in range(self.vocabulary):
                text = self.decode([token])
                if not text or "\ufffd" in text:
                    unclear.append(token)
                for character in set(text):
                    having.setdefault(character, []).append(token)
            self._having = {c: np.array(tokens, np.int32) for c, tokens in having.items()}
            self._unclear = np.array(unclear, np.int32)

    def may_end(self, stops: tuple[str, ...]) -> NDArray[np.bool_]:
        """bool [vocabulary]: tokens that may end one of these stop strings. Their text contains the
        string's last character, or is unclear."""
        self.build()
        searched = {stop[-1] for stop in stops}
        # Some tokenizers strip the space of a lone token.
        if any(character.isspace() for character in searched):
            return np.ones(self.vocabulary, dtype=bool)
        table = np.zeros(self.vocabulary, dtype=bool)
        table[self._unclear] = True
        for character in searched & self._having.keys():
            table[self._having[character]] = True
        return table


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
