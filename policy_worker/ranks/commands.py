"""Commands of rank 0 to the other ranks of its replica: one for each operation of the Trainer."""

from __future__ import annotations

from enum import StrEnum, auto


class RankCommand(StrEnum):
    """Each is executed by the Trainer's method of that name, except GATHER and STOP."""

    ATTACH = auto()
    FORM = auto()
    ABANDON = auto()
    RESTORE = auto()
    SEND_STATE = auto()
    RECEIVE_STATE = auto()
    DIGEST = auto()
    BEGIN = auto()
    ADD = auto()
    REDUCE = auto()
    COMMIT = auto()
    SAVE = auto()
    GATHER = auto()
    """whole_weights(), to the end."""
    STOP = auto()
    """The process exits."""
