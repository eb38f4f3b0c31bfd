"""Error of a controller that does not lead."""

from __future__ import annotations


class NotLeading(Exception):
    """This controller does not lead now. ``leader`` is the address of the one that does, if
    known."""

    def __init__(self, message: str, leader: str = "") -> None:
        super().__init__(message)
        self.leader = leader
