"""One scorer worker: ``python -P -m scorer_worker CONFIG --scorer NAME --controllers HOST:PORT,...
--id NAME-0``.

Exit status: 0 after the run has ended or the worker was drained, 2 for bad input (one line on
standard error), else 1.
"""

import argparse

from paceline.config.schema import Config
from paceline.process.worker_command import without_collection, worker_command


def run(config: Config, options: argparse.Namespace) -> int:
    with without_collection():
        from scorer_worker.main import run

    return run(config, options)


if __name__ == "__main__":
    worker_command("scorer", run)
