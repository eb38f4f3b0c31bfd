"""The one error every door of the configuration raises."""

from __future__ import annotations

from paceline.errors import BadInput


class ConfigError(BadInput):
    """A configuration cannot be used. Its message names the field, the place and the remedy.

    Several problems are reported at once, one line each.
    """
