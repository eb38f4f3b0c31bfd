"""Finding of a check, and the run that checks look at."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from paceline.config.schema import Config
from paceline.masking import masked

if TYPE_CHECKING:
    from paceline_launcher.preflight.data import FoundData

CORRECT = "Correct that setting"


@dataclass(frozen=True, slots=True)
class Finding:
    state: Literal["ok", "warn", "fail", "skip"]
    """warn: it works, perhaps badly. fail: it will not work. skip: it is not checked here."""
    found: str
    remedy: str = ""
    name: str = ""
    """Name of the check."""

    def __str__(self) -> str:
        if not self.remedy:
            return masked(self.found)
        between = "" if self.found.endswith("\n") else " " if self.found[-1:] in ".?" else ". "
        return masked(f"{self.found}{between}{self.remedy}")


Findings = Iterator[Finding]


def ok(found: str) -> Finding:
    return Finding("ok", found)


def warn(found: str, remedy: str) -> Finding:
    return Finding("warn", found, remedy)


def fail(found: str, remedy: str = CORRECT) -> Finding:
    return Finding("fail", found, remedy)


def skip(why: str) -> Finding:
    return Finding("skip", why)


@dataclass(frozen=True)
class Start:
    given: Config | None
    """None: the machine alone is checked."""
    run_dir: Path
    fresh: bool = False
    """The earlier run in ``run_dir`` is to be removed."""
    here: bool = False
    """The fleet is to be started on this machine now."""
    placed: Collection[str] | None = None
    """Workers that have their places on this node; None: all of [fleet] start here."""

    @property
    def config(self) -> Config:
        assert self.given is not None
        return self.given

    @cached_property
    def data(self) -> FoundData:
        from paceline_launcher.preflight.data import open_data

        return open_data(self.config)
