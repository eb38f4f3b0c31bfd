"""Masking of secrets in whatever a person may read: errors, logs, printed configurations.

It works on the text that leaves the process, not on the settings that are known to hold a secret:
what a new setting, a library's error or a user's own option has in it is masked as well.

What a Redactor gives out leaves the machine, and hides more:

- A URL keeps its scheme, host and path. The part before the last @ may hold a password, and so may
  the query; if the two cannot be separated, only the scheme remains.
- A path, or a URL of a local file, keeps its last part.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MASK = "***"
_URL = re.compile(r"(?P<scheme>[A-Za-z][\w+.-]*://)(?P<hidden>(?:(?!\w://)[^\s\"'<>])*)@")
_PAIR = re.compile(r":(?!/)(?:(?!\w://)[^\s\"'<>]){1,256}@(?!sha256:)")
"""User and password, in an address with no scheme or a mistyped one."""
_QUERY = re.compile(
    r"(?P<name>[?&][^=&\s\"']*(?:passw|token|secret|key|sig|credential|ssl_ca)[^=&\s\"']*=)"
    r"[^&\s\"'<>]+",
    re.IGNORECASE,
)
_NAME = re.compile(r"(?:^|[._-])(?:password|passwd|secret|token|credentials?|api_?key)$", re.I)


def masked(text: str) -> str:
    """``text``; what stands before the @ of an address, and keys and certificates in its query, are
    replaced. The name of a user stays if a password follows it."""
    if "@" in text:
        text = _PAIR.sub(f":{MASK}@", _URL.sub(_masked, text))
    return _QUERY.sub(rf"\g<name>{MASK}", text) if "://" in text else text


def masked_settings(value: Any, name: str = "") -> Any:
    """``value`` of a configuration, tables and lists included, for printing. Whole texts are masked
    if the name of their setting is that of a secret."""
    if isinstance(value, Mapping):
        return {key: masked_settings(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [masked_settings(inner, name) for inner in value]
    if isinstance(value, str):
        return MASK if value and _NAME.search(name) else masked(value)
    return value


def _masked(found: re.Match[str]) -> str:
    user, colon, _ = found["hidden"].partition(":")
    # In a URL without a scheme's usual form the two cannot be told apart.
    shown = f"{user}:{MASK}" if colon and "/" not in user else MASK
    return f"{found['scheme']}{shown}@"


# A password may hold a quote: it ends the URL only if no more of the URL follows.
_WHOLE_URL = r"(?P<scheme>[A-Za-z][\w+.-]*)://(?P<rest>(?:[^\s\"']|[\"'](?![\s,;:.)\]}\"']|$))*)"
_PART = r"[^\s/'\",;:()<>]"
_PATH = rf"(?<![\w./…])(?:~|\.\.?)?/+(?:{_PART}+/+)*(?P<last>{_PART}*)"
_SHOWN = re.compile(f"{_WHOLE_URL}|{_PATH}")


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
