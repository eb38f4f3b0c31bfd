"""The transcripts of a sample: each is one sequence of tokens.

first    said made said made said made     A piece is a turn of the model with its input.
branch          └─ said made               It shares the pieces before it with another,
branch   said made said made               or none: a conversation of its own.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.dataset.messages import Message
from rollout_worker.engine.base import Completion
from rollout_worker.environments.base import Turn


@dataclass(frozen=True, slots=True, eq=False)
class TranscriptPiece:
    """A turn and its input. ``said``: int32 [n], n may be 0 after the first."""

    said: NDArray[np.int32]
    completion: Completion
    said_text: str
    turn: Turn
    messages: list[Message] | None
    """Input and turn as messages; None if the input was text or tokens."""

    def __len__(self) -> int:
        """Tokens."""
        return len(self.said) + len(self.completion.tokens)


@dataclass(slots=True, eq=False)
class Transcript:
    pieces: list[TranscriptPiece] = field(default_factory=list)
    shared: int = 0  # Pieces at the beginning that another transcript has made
    tools: list[dict[str, Any]] = field(default_factory=list)
    """The tools in the first prompt, as chat templates expect them."""
    running: asyncio.Task[Any] | None = None  # Its next turn
    full: bool = False  # A turn of it was refused: there was no room, or no turn left
    raced: bool = False  # It was begun through the endpoint, before any turn of the sample was over

    @property
    def own(self) -> list[TranscriptPiece]:
        return self.pieces[self.shared :]

    @property
    def tokens(self) -> NDArray[np.int32]:
        """int32 [n], of the transcript so far."""
        parts = [part for piece in self.pieces for part in (piece.said, piece.completion.tokens)]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    def branch(self, shared: int) -> "Transcript":
        """A transcript that continues after the first ``shared`` pieces."""
        return Transcript(self.pieces[:shared], shared, self.tools if shared else [])
