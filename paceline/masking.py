"""Masking of secrets in whatever a person may read: errors, logs, printed configurations.

It works on the text that leaves the process, not on the settings that are known to hold a secret:
what a new setting, a library's error or a user's own option has in it is masked as well.
"""

import re
from collections.abc import Mapping
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
