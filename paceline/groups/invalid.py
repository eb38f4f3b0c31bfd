"""Refusal of a malformed message."""

from __future__ import annotations


class Invalid(ValueError):
    """The request, or one group in it, is malformed. Nothing has changed."""
