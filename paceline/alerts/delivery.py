"""Delivery of alerts to a webhook and to a command, each within a time limit.

The address is a secret (chat services put a key into it): no message and no error contains it.
"""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config.sections.services import AlertsConfig

TIMEOUT_S = 10.0


class NotDelivered(Exception):
    """The webhook or the command did not take the alert. The text names no secret."""


@dataclass(frozen=True, slots=True)
class Delivery:
    webhook_file: Path | None
    command: Sequence[str]

    @classmethod
    def of(cls, config: AlertsConfig) -> Delivery:
        file = config.webhook_file
        return cls(None if file is None else Path(file), tuple(config.command))

    @property
    def configured(self) -> bool:
        return self.webhook_file is not None or bool(self.command)

    def send(self, message: Mapping[str, Any]) -> None:
        """To both. Raises NotDelivered if one fails; the other got it nevertheless."""
        body = json.dumps(message).encode()
        problems = []
        for deliver in (self._post, self._run):
            try:
                deliver(body)
            except NotDelivered as problem:
                problems.append(str(problem))
        if problems:
            raise NotDelivered("; ".join(problems))

    def _post(self, body: bytes) -> None:
        if self.webhook_file is None:
            return
        try:
            url = self.webhook_file.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise NotDelivered(f"alerts.webhook_file cannot be read: {error.strerror}") from None
        if not url.startswith(("http://", "https://")):
            raise NotDelivered("alerts.webhook_file must contain one http:// or https:// URL")
        try:
            request = urllib.request.Request(
                url, body, {"Content-Type": "application/json"}, method="POST"
            )
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                answer.read(1024)
        except urllib.error.HTTPError as error:
            raise NotDelivered(f"the webhook answered {error.code}") from None
        except (OSError, ValueError) as error:
            why = getattr(error, "reason", None)
            kind = type(why if isinstance(why, Exception) else error).__name__
            raise NotDelivered(f"the webhook did not answer ({kind})") from None

    def _run(self, body: bytes) -> None:
        if not self.command:
            return
        try:
            done = subprocess.run(
                self.command, input=body, timeout=TIMEOUT_S, capture_output=True, check=False
            )
        except subprocess.TimeoutExpired:
            raise NotDelivered(f"alerts.command took longer than {TIMEOUT_S:g} s") from None
        except OSError as error:
            raise NotDelivered(f"alerts.command cannot be run: {error.strerror}") from None
        if done.returncode:
            raise NotDelivered(f"alerts.command ended with status {done.returncode}")
