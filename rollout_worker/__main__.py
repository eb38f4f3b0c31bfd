"""One rollout worker: ``python -P -m rollout_worker CONFIG --controllers HOST:PORT,... --id
rollout-0``.

Exit status: 0 after the run has ended, 2 for bad input (one line on standard error), 3 if the
engine died while it generated, else 1.
"""

import argparse

from paceline.config.schema import Config
from paceline.process.worker_command import without_collection, worker_command


def run(config: Config, options: argparse.Namespace) -> int:
    with without_collection():
        from rollout_worker.main import run

    return run(config, options)


if __name__ == "__main__":
    worker_command("rollout", run)
