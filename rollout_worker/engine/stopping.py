"""End of a completion: end-of-sequence tokens and stop strings."""

from __future__ import annotations

import threading
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


class TokenTexts:
    """Characters of each token, for all stop strings of an engine.

    Every token of the vocabulary is decoded once, which takes seconds for a large vocabulary.
    """

    def __init__(self, decode: Decode, vocabulary: int) -> None:
        self._decode = decode
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._unclear: NDArray[np.int32] | None = None
        """Tokens whose text alone is empty or contains part of a character."""
        self._having: dict[str, NDArray[np.int32]] = {}

    def build(self) -> None:
        """Idempotent."""
        with self._lock:
            if self._unclear is not None:
                return
            unclear: list[int] = []
            having: dict[str, list[int]] = {}
            for token in range(self._vocabulary):
                text = self._decode([token])
                if not text or "\ufffd" in text:
                    unclear.append(token)
                for character in set(text):
                    having.setdefault(character, []).append(token)
            self._having = {c: np.array(tokens, np.int32) for c, tokens in having.items()}
            self._unclear = np.array(unclear, np.int32)

    def may_hold(self, characters: Iterable[str]) -> NDArray[np.bool_]:
        """bool [vocabulary]: tokens whose text may contain one of these characters."""
        self.build()
        searched = set(characters)
        # Some tokenizers strip the space of a lone token.
        if any(character.isspace() for character in searched):
            return np.ones(self._vocabulary, dtype=bool)
        table = np.zeros(self._vocabulary, dtype=bool)
        table[self._unclear] = True
        for character in searched & self._having.keys():
            table[self._having[character]] = True
        return table


class StopStrings:
    """Finds stop strings without decoding every token of every row.

    A table over the vocabulary marks the tokens that can end a stop string: those whose text contains
    the string's last character, and those whose text alone is unclear. Only rows that drew such a token
    are decoded, and only their tail.
    """

    def __init__(
        self,
        strings: tuple[str, ...],
        decode: Decode,
        vocabulary: int,
        texts: TokenTexts | None = None,
    ) -> None:
        """``texts``: shared by the stop strings of one ``decode`` and ``vocabulary``."""
        self.strings = strings
        self._decode = decode
        # A token may carry no more than a byte of a character.
        self._tail = max(len(s.encode()) for s in strings) + 4
        texts = texts or TokenTexts(decode, vocabulary)
        self._table = texts.may_hold(s[-1] for s in strings)

    def may_end(self, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        return self._table[tokens]

    def found(self, tokens: NDArray[np.int32]) -> str | None:
        """The stop string that the completion's newest token completed, the earliest if several."""
        if len(tokens) > self._tail:
            tokens = tokens[-self._tail :]
        text = self._decode(tokens.tolist())
        hits = [(at, s) for s in self.strings if (at := text.find(s)) >= 0]
        return min(hits)[1] if hits else None
