"""Delivery of an alert to a webhook and a command. The webhook's address is a secret (chat services
put a key into it): no message and no error contains it."""

import json
import subprocess
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from paceline.config.sections.services import AlertKind, AlertsConfig

TIMEOUT_S = 10.0


class Alert(NamedTuple):
    kind: AlertKind
    key: str  # event id, or the step at which a state began: the same however often it is sent
    text: str
    t: float  # Unix seconds
    step: int = 0

    def message(self, run: str) -> dict[str, Any]:
        """The alert as JSON. ``text`` is what chat services show."""
        return {
            "text": f"[{run}] {self.kind.replace('_', ' ')}: {self.text}",
            "run": run,
            "kind": self.kind,
            "id": f"{run}/{self.kind}/{self.key}",
            "step": self.step,
            "t": self.t,
        }


class NotDelivered(Exception):
    """The webhook or the command did not take the alert. The text names no secret."""


def deliver(config: AlertsConfig, message: Mapping[str, Any]) -> None:
    """Sends to webhook and command. Raises NotDelivered if one fails; the other got it anyway."""
    body = json.dumps(message).encode()
    posted = _post(Path(config.webhook_file), body) if config.webhook_file is not None else ""
    ran = _run(config.command, body) if config.command else ""
    if posted or ran:
        raise NotDelivered("; ".join(filter(None, (posted, ran))))


def _post(file: Path, body: bytes) -> str:
    """The problem; empty if the webhook has taken it."""
    try:
        url = file.read_text(encoding="utf-8").strip()
    except OSError as error:
        return f"alerts.webhook_file cannot be read: {error.strerror}"
    if not url.startswith(("http://", "https://")):
        return "alerts.webhook_file must contain one http:// or https:// URL"
    try:
        request = Request(url, body, {"Content-Type": "application/json"}, method="POST")
        urlopen(request, timeout=TIMEOUT_S).close()
    except HTTPError as error:
        return f"the webhook answered {error.code}"
    except (OSError, ValueError, HTTPException) as error:
        return f"the webhook did not answer ({type(error).__name__})"
    return ""


def _run(command: list[str], body: bytes) -> str:
    try:
        done = subprocess.run(command, input=body, timeout=TIMEOUT_S, capture_output=True)
    except subprocess.TimeoutExpired:
        return f"alerts.command took longer than {TIMEOUT_S:g} s"
    except OSError as error:
        return f"alerts.command cannot be run: {error.strerror}"
    return f"alerts.command ended with status {done.returncode}" if done.returncode else ""
