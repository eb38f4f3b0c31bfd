"""Settings that a run may change: the values in force, and what became of those it was started
with.

- ``values`` are in force. ``paceline set`` changes them, and so does a leader whose config file was
  edited.
- ``configured`` are the values of the newest config file that a leader brought. Only a value that
  differs from it is an edit: a leader whose file still has the first learning rate does not take
  back ``paceline set``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.ids import Step

RUN_LENGTH = ("train.steps", "train.epochs", "train.max_samples")  # Exactly one is set


@dataclass(frozen=True, slots=True)
class SettingChange:
    old: Any
    new: Any
    step: Step
    """First step that uses the new value."""


@dataclass(slots=True)
class Settings:
    """By dotted name, as JSON values."""

    values: dict[str, Any] = field(default_factory=dict)
    configured: dict[str, Any] = field(default_factory=dict)
    changed: dict[str, SettingChange] = field(default_factory=dict)
    """Settings that are not what the run was started with: that value, and the one in force."""

    def edited(self, file: Mapping[str, Any]) -> dict[str, Any]:
        """Values in ``file``, a leader's config, edited since a leader last brought one."""
        known = self.configured
        found = {n: v for n, v in file.items() if n not in known or known[n] != v}
        if any(n in found for n in RUN_LENGTH):
            # One of them is set. A file that now sets another one also takes back what ``paceline
            # set`` has set.
            found |= {n: file[n] for n in RUN_LENGTH if n in file}
        return found

    def differing(self, asked: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Old and new value of what is not in force yet."""
        known = self.values
        return {n: (known.get(n), v) for n, v in asked.items() if n not in known or known[n] != v}

    def change(self, changes: Mapping[str, tuple[Any, Any]], step: Step) -> None:
        for name, (old, new) in changes.items():
            self.values[name] = new
            before = self.changed.pop(name, None)
            first = old if before is None else before.old
            if first != new:
                self.changed[name] = SettingChange(first, new, step)
