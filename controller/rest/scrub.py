"""Text for people outside: no password, and no path that is not below the run directory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PATH = re.compile(r"(?<![\w.:/…])(?:~|\.\.?)?/(?:[^\s/'\",;:()<>]+/)*([^\s/'\",;:()<>]*)")
_SECRET = re.compile(r"(\w+://)[^\s/@]*@")


class Scrubber:
    """Shows paths relative to ``run_dir``, others by their last part alone."""

    def __init__(self, run_dir: Path) -> None:
        shown = {str(run_dir), str(run_dir.absolute()), str(run_dir.resolve())}
        # The longest first: a relative name may be the end of the absolute one.
        self._prefixes = sorted((f"{p}/" for p in shown if p not in (".", "/")), key=len)[::-1]

    def text(self, text: str) -> str:
        if "/" not in text:
            return text
        for prefix in self._prefixes:
            text = text.replace(prefix, "")
        return _PATH.sub(r"…/\1", _SECRET.sub(r"\1", text))

    def value(self, value: Any) -> Any:
        """Of JSON, whatever is in it."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {key: self.value(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(item) for item in value]
        return value
