"""Checks before a run starts: each has a name, what was found, and what to do about it.

``run_checks`` is the one list of what a run needs. ``paceline config check``, ``paceline up
--dry-run``, ``paceline up`` and ``paceline doctor`` all go through it; a check that cannot be made
where it is asked for says why it is skipped. ``paceline doctor`` also looks at the machine, at
running controllers and at clocks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.config.schema import Config
    from paceline.config.sections.services import AuthConfig
    from paceline_launcher.preflight.check import Check

PLACED = ("run directory", "earlier run", "inputs", "access", "ports", "redis", "payloads")
"""Checks that mean something only on the machine where the processes of a run start."""


def machine_checks(
    config: Config | None, auth: AuthConfig, addresses: Sequence[str], run_dir: Path | None
) -> Iterator[Check]:
    """Yields each result as soon as it is there. ``addresses``: of controllers that run already."""
    from paceline_launcher.preflight import machine, network
    from paceline_launcher.preflight.clock_skew import check_hosts
    from paceline_launcher.preflight.deadline import checks_in_time

    yield from machine.packages()
    yield from machine.devices(config)
    if config is None:
        yield from machine.vllm(None)
        yield from network.redis(None)
        if not addresses:
            yield from network.ports(None, run_dir)
    yield from machine.shared_memory()
    yield from machine.open_files()
    directory = run_dir or (default_run_dir(config) if config else Path("runs"))
    yield from checks_in_time(
        "disk", f"--run-dir: {directory}", lambda: machine.disk(config, directory)
    )
    yield from machine.memory()
    yield from machine.cores(config)
    if config is not None:
        yield from run_checks(config, run_dir or default_run_dir(config), runs=bool(addresses))
    yield from check_hosts(config, auth, addresses)


def default_run_dir(config: Config) -> Path:
    """Where ``paceline up`` puts a run without --run-dir."""
    return Path("runs") / config.run.name


def run_checks(
    config: Config,
    run_dir: Path,
    *,
    runs: bool = False,
    fresh: bool = False,
    up: bool = False,
    placed: bool = False,
) -> Iterator[Check]:
    """What a run needs. Starts nothing that stays.

    ``runs``: its controllers run already. ``fresh``: the earlier run in ``run_dir`` is to be
    removed. ``up``: the fleet is to be started here and now. ``placed``: its workers have places
    among nodes already.
    """
    from paceline_launcher.preflight import machine, network
    from paceline_launcher.preflight.check import skip
    from paceline_launcher.preflight.config_warnings import config_warnings
    from paceline_launcher.preflight.deadline import checks_in_time
    from paceline_launcher.preflight.earlier_run import earlier_run
    from paceline_launcher.preflight.inputs import input_checks as inputs
    from paceline_launcher.preflight.inputs.gpu_memory import gpu_memory
    from paceline_launcher.preflight.inputs.gpu_placement import gpu_placement

    yield from machine.own_packages()
    yield from config_warnings(config)
    yield from machine.vllm(config)
    if up:
        yield from network.provider(config)
    if not up and config.fleet.provider in ("kubernetes", "ray"):
        why = (
            f"fleet.provider is {config.fleet.provider}: this is checked where the processes start"
        )
        yield from (skip(name, why) for name in PLACED)
        return
    yield from gpu_memory(config)
    if up and not placed:
        yield from gpu_placement(config, os.environ)
    there = f"--run-dir: {run_dir}"
    yield from checks_in_time("run directory", there, lambda: machine.run_directory(run_dir))
    if fresh or runs:
        yield skip("earlier run", "--fresh removes it" if fresh else "the run is running")
    else:
        yield from checks_in_time("earlier run", there, lambda: earlier_run(config, run_dir))
    yield from inputs.inputs(config)
    yield from network.access(config)
    if runs:
        yield skip("ports", "the run is running: its controllers hold them")
    else:
        yield from network.ports(config, run_dir)
    yield from network.redis(config)
    yield from network.payloads(config)


def control_checks(config: Config, run_dir: Path) -> Iterator[Check]:
    """What Redis and the controllers of a run need, whose workers start on other machines."""
    from paceline_launcher.preflight import machine, network
    from paceline_launcher.preflight.config_warnings import config_warnings
    from paceline_launcher.preflight.deadline import checks_in_time
    from paceline_launcher.preflight.earlier_run import earlier_run
    from paceline_launcher.preflight.inputs import input_checks as inputs

    there = f"--run-dir: {run_dir}"
    yield from machine.own_packages()
    yield from config_warnings(config)
    yield from checks_in_time("run directory", there, lambda: machine.run_directory(run_dir))
    yield from checks_in_time("earlier run", there, lambda: earlier_run(config, run_dir))
    yield from inputs.inputs(config)
    yield from network.access(config)
    yield from network.ports(config, run_dir)
    yield from network.redis(config)
    yield from network.payloads(config)
