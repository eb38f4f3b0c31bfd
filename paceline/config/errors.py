"""The error for a configuration that cannot be used."""

from __future__ import annotations

from paceline.errors import BadInput


class ConfigError(BadInput):
    """The message names the field, the place (file and line, or override) and the remedy.

    Several problems are reported at once, one per line.
    """
