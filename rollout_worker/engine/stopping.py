"""When a completion ends: end-of-sequence tokens and stop strings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens kept."""


class EndTokens:
    def __init__(self, tokens: Iterable[int], vocabulary: int) -> None:
        self._table = np.zeros(vocabulary, dtype=bool)
        self._table[[token for token in tokens if 0 <= token < vocabulary]] = True

    def __call__(self, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        return self._table[tokens]


class StopStrings:
    """Finds stop strings without decoding every token of every row.

    A table over the vocabulary says which tokens can be the last of a stop string: those whose text
    has the string's last character, and those whose text alone is unclear. Only rows that drew such
    a token are decoded, and of those only the tail.
    """

    def __init__(self, strings: tuple[str, ...], decode: Decode, vocabulary: int) -> None:
        self.strings = strings
        self._decode = decode
        # A token may carry no more than a byte of a character.
        self._tail = max(len(s.encode()) for s in strings) + 4
        last = {s[-1] for s in strings}
        self._table = np.zeros(vocabulary, dtype=bool)
        for token in range(vocabulary):
            text = decode([token])
            self._table[token] = (
                not text
                or "�" in text
                or any(c in text for c in last)
                # Some tokenizers strip the space of a lone token.
                or any(c.isspace() for c in last)
            )

    def may_end(self, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        return self._table[tokens]

    def found(self, tokens: NDArray[np.int32]) -> str | None:
        """The stop string that the completion's newest token completed, the earliest if several."""
        if len(tokens) > self._tail:
            tokens = tokens[-self._tail :]
        text = self._decode(tokens.tolist())
        hits = [(at, s) for s in self.strings if (at := text.find(s)) >= 0]
        return min(hits)[1] if hits else None
