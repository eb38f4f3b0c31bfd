"""Redaction of passwords, and of paths outside the run directory.

- A URL keeps its scheme, host and path. The part before the last @ may hold a password, and so may
  the query; if the two cannot be separated, only the scheme remains.
- A path, or a URL of a local file, keeps its last part.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# A password may hold a quote: it ends the URL only if no more of the URL follows.
_URL = r"(?P<scheme>[A-Za-z][\w+.-]*)://(?P<rest>(?:[^\s\"']|[\"'](?![\s,;:.)\]}\"']|$))*)"
_PART = r"[^\s/'\",;:()<>]"
_PATH = rf"(?<![\w./…])(?:~|\.\.?)?/+(?:{_PART}+/+)*(?P<last>{_PART}*)"
_SHOWN = re.compile(f"{_URL}|{_PATH}")


class Redactor:
    """Shows paths below ``run_dir`` relative to it, and other paths by their last part."""

    def __init__(self, run_dir: Path) -> None:
        shown = {str(run_dir), str(run_dir.absolute()), str(run_dir.resolve())}
        # Longest first: a relative name may be the end of the absolute one.
        self._prefixes = sorted((f"{p}/" for p in shown if p not in (".", "/")), key=len)[::-1]

    def text(self, text: str) -> str:
        if "/" not in text:
            return text
        for prefix in self._prefixes:
            text = text.replace(prefix, "")
        return _SHOWN.sub(_shown, text)

    def value(self, value: Any) -> Any:
        """The same for all text in a JSON value."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {key: self.value(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(item) for item in value]
        return value


def _shown(found: re.Match[str]) -> str:
    if found["scheme"] is None:
        return found[0] if not found[0].strip("/") else f"…/{found['last']}"
    scheme = found["scheme"]
    hidden, at, rest = found["rest"].rpartition("@")
    if at and ("?" in hidden or "#" in hidden):
        return f"{scheme}://…"
    rest = re.split(r"[?#]", rest, maxsplit=1)[0]
    if rest.startswith("/") or scheme == "file" or scheme.startswith("sqlite"):
        return f"{scheme}://…/{rest.rpartition('/')[2]}"
    return f"{scheme}://{rest}"
