"""Reasons for which a controller does not start or does not answer."""

from __future__ import annotations

from paceline.errors import BadInput


class BadStart(BadInput):
    """The controller cannot start; the message names the thing and the remedy. Exit status 2."""


class NotLeading(Exception):
    """This controller does not lead now. ``leader`` is the address of the one that does, if known."""

    def __init__(self, message: str, leader: str = "") -> None:
        super().__init__(message)
        self.leader = leader
