"""Checks before a run starts: each has a name, what was found, and what to do about it.

| command | checks |
|---|---|
| ``paceline doctor`` | this machine, the run's inputs and needs, running controllers and clocks |
| ``paceline up`` | what the run needs on this machine; any failure ends the command |
| ``paceline config check`` | settings that contradict each other |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.config.schema import AuthConfig, Config
    from paceline.preflight.check import Check


def machine_checks(
    config: Config | None, auth: AuthConfig, addresses: Sequence[str], run_dir: Path | None
) -> Iterator[Check]:
    """Yields each result as soon as it is there. ``addresses``: of controllers that run already."""
    from paceline.preflight import inputs, machine, network
    from paceline.preflight.clock_skew import check_hosts
    from paceline.preflight.config_warnings import config_warnings

    yield from machine.packages()
    yield from machine.devices(config)
    yield from machine.vllm(config)
    yield from network.redis(config)
    if not addresses:
        yield from network.ports(config, run_dir)
    yield from machine.shared_memory()
    yield from machine.open_files()
    yield from machine.disk(config, run_dir)
    yield from machine.memory()
    yield from machine.cores(config)
    if config is not None:
        yield from inputs.inputs(config)
        yield from config_warnings(config)
    yield from check_hosts(config, auth, addresses)


def run_checks(config: Config, run_dir: Path) -> Iterator[Check]:
    """What ``paceline up`` needs. Starts nothing that stays."""
    from paceline.preflight import inputs, machine, network

    yield from machine.own_packages()
    yield from inputs.inputs(config)
    yield from machine.vllm(config)
    yield from network.provider(config)
    yield from network.access(config)
    yield from network.ports(config, run_dir)
    yield from network.redis(config)
