"""Check of one objective as a policy worker loads it, and of the properties that a fleet rests on.

    python -P -m policy_worker.objectives.conformance.check package.module:Class CONFIG_AS_JSON

Exit status 2, with one line on standard error, if it cannot be used: it cannot be loaded, or its
gradient depends on how a fleet splits a step. Each other property that a toy step does not have is
one line on standard output.
"""

from __future__ import annotations

import argparse
from typing import Any

from paceline.config.load import ConfigError
from paceline.config.schema import Config
from paceline.process.lifetime import leave_after
from policy_worker.objectives.load import ObjectiveError, load_objective


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="policy_worker.objectives.conformance.check", description=__doc__
    )
    parser.add_argument("name", help="of train.algorithm")
    parser.add_argument("config", type=Config.model_validate_json, help="of the run, as JSON")
    given = parser.parse_args()
    for line in doubts(given.config):
        print(line)
    return 0


def doubts(config: Config) -> list[str]:
    """What the objective of ``config`` lacks that a fleet does not rest on. Raises ObjectiveError
    if it cannot be used."""
    load_objective(config)
    # A toy step needs transformers: only if there is an objective to try on it.
    from policy_worker.objectives.conformance.conformance import conformance

    name = config.train.algorithm
    try:
        found = conformance(name, config.objective.options, _train(config))
    except ConfigError as error:
        return [f"train.algorithm = {name}: its properties were not tried: {error}"]
    if missing := [each for each in found if each.needed]:
        said = "; ".join(f"it fails at {each.name!r}: {each.problem}" for each in missing)
        raise ObjectiveError(f"train.algorithm = {name}: {said}")
    return [
        f"train.algorithm = {name}: it fails at {each.name!r}: {each.problem}"
        for each in found
        if each.problem
    ]


def _train(config: Config) -> dict[str, Any]:
    """The settings of [train] that a toy step may have: it has no scorer, and groups of its own."""
    given = config.train.model_dump(mode="json", exclude_defaults=True)
    return {name: value for name, value in given.items() if name not in _NOT_OF_THE_TOY}


_NOT_OF_THE_TOY = ("algorithm", "reference", "reference_path", "filter_uninformative")


if __name__ == "__main__":
    leave_after(main, "check")
