"""Check of an objective of a user: that a policy worker can load it, and that a step may be split
in any way."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.config.schema import Config
from paceline.config.sections.objectives import BUILT_IN
from paceline_launcher.preflight.check import CORRECT, Check, fail, warn
from paceline_launcher.preflight.inputs.import_check import import_check


def objective_checks(config: Config) -> Iterator[Check]:
    """Those that are built in were checked with the settings, and their properties are tested."""
    name = config.train.algorithm
    if name in BUILT_IN:
        return
    done = import_check("policy_worker.conformance", name, config.model_dump_json())
    if done.problem:
        yield fail("inputs", done.problem, CORRECT)
        return
    for line in done.said:
        yield warn("objective", line, f"paceline check-objective {name} tries it alone")
