"""One policy replica: ``python -P -m policy_worker CONFIG --controllers HOST:PORT,... --id
policy-0``.

Under torchrun's environment it is the rank of a replica that the environment names; rank 0 is the
worker that the controller knows.

Exit status: 0 after the run has ended, 2 for bad input (one line on standard error), else 1.
"""

from __future__ import annotations

import argparse
import os

from paceline.config.schema import Config
from paceline.process.torchrun_environment import torchrun_place
from paceline.process.worker_command import without_collection, worker_command


def run(config: Config, options: argparse.Namespace) -> int:
    place = torchrun_place(os.environ, config.fleet.policy_ranks)
    if place is not None and place.rank > 0:
        from policy_worker.follower import follow_from_outside

        return follow_from_outside(config, place, options)
    with without_collection():
        from policy_worker.main import run

    return run(
        config,
        controllers=options.controllers,
        worker_id=options.id,
        run_dir=options.run_dir,
        tensor_host=options.tensor_host,
        place=place,
    )


if __name__ == "__main__":
    worker_command("policy", run)
