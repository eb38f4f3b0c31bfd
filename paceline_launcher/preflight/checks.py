"""Checks before a start, in one table, of which each command runs those of its places.

A check is here if what it finds would cost a user minutes, or be hard to understand, once processes
run. What they refuse at once and as clearly (a taken address of a controller, a chat template that
is missing) is left to them."""

import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Flag, auto
from pathlib import Path

from paceline.config.schema import Config
from paceline.errors import BadInput, in_words
from paceline_launcher.preflight import data, machine, models, network, user_code
from paceline_launcher.preflight.earlier_run import config_warnings, earlier_run
from paceline_launcher.preflight.findings import Finding, Findings, Start, fail, skip

LENGTH, FIRST_ROW, PLACEMENT = "run length", "first row", "GPU placement"
"""Checks whose findings are shown even if all is well."""
SLOW_S = 2.0
"""A check that takes longer is named: it imports torch, or a mount is dead, or a server deaf."""


class Place(Flag):
    """Places at which a check has something to look at."""

    MACHINE = auto()
    """Any machine, also without a run (``paceline doctor``)."""
    ANYWHERE = auto()
    """The settings alone."""
    CONTROL = auto()
    """The machine on which Redis and the controllers start."""
    WORKERS = auto()
    """A machine on which workers start."""


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    places: Place
    run: Callable[[Start], Findings]


_M, _A, _C, _W = Place
CHECKS = (
    Check("python", _M, machine.packages),
    Check("devices", _M, machine.devices),
    Check("shared memory", _M, machine.shared_memory),
    Check("settings", _A, lambda start: config_warnings(start.config)),
    Check("vllm", _M | _W, machine.vllm),
    Check("C compiler", _W, machine.compiler),
    Check("provider", _W, network.provider),
    Check("GPU memory", _W, lambda start: machine.gpu_memory(start.config, here=start.placed)),
    Check(PLACEMENT, _W, machine.gpu_placement),
    Check("disk", _M | _C, machine.disk),
    Check("earlier run", _C, earlier_run),
    Check("model", _C | _W, models.model),
    Check("data", _C | _W, lambda start: iter(start.data.findings)),
    Check(LENGTH, _C | _W, data.run_length),
    Check(FIRST_ROW, _C | _W, user_code.first_row),
    Check("rewards", _C | _W, user_code.rewards),
    Check("engine", _C | _W, lambda start: user_code.engine(start.config)),
    Check("objective", _C | _W, lambda start: user_code.objective(start.config)),
    Check("judges", _C | _W, lambda start: user_code.judges(start.config)),
    Check("access", _C, network.access),
    Check("redis", _M | _C, network.redis),
    Check("payloads", _C, network.payloads),
)


def default_run_dir(config: Config) -> Path:
    """The directory in which ``paceline up`` puts a run without --run-dir."""
    return Path("runs") / config.run.name


def run_checks(start: Start, at: Place) -> Iterator[Finding]:
    """Yields the findings of a start ``at`` these places."""
    run = Place.ANYWHERE | Place.CONTROL | Place.WORKERS
    local = start.here or start.given is None or start.config.fleet.provider in ("local", "none")
    for check in CHECKS:
        wanted = check.places & (at if start.given is not None else at & ~run)
        if not wanted:
            continue
        if not local and not wanted & (Place.MACHINE | Place.ANYWHERE):
            provider = start.config.fleet.provider
            why = f"fleet.provider is {provider}: this is checked where the processes start"
            yield replace(skip(why), name=check.name)
            continue
        line = f"checking {check.name}: what it imports, reads or asks takes its time"
        slow = threading.Timer(SLOW_S, print, [line], {"file": sys.stderr})
        slow.daemon = True
        slow.start()
        try:
            for finding in check.run(start):
                yield replace(finding, name=check.name)
        except OSError as error:
            # A path that the system refuses to look at: too long a name, a broken file system.
            yield replace(fail(in_words(error), "Give another path"), name=check.name)
        finally:
            slow.cancel()


def passed(start: Start, at: Place) -> list[Finding]:
    """The findings of a start ``at`` these places, with warnings on standard error. Raises BadInput
    with a line for each check that failed."""
    found = list(run_checks(start, at))
    for check in found:
        if check.state == "warn":
            print(f"warning: {check}", file=sys.stderr)
    if failed := [str(check) for check in found if check.state == "fail"]:
        raise BadInput("\n".join(failed))
    return found
