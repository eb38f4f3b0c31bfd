"""``python -m policy_worker CONFIG --controllers host:port,... --id policy-0``: one policy replica."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from paceline.process.process_exit import leave_after
from paceline.process.user_code import search_start_directory_last


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 after the run ended, 2 for bad input (one line on standard error), else 1."""
    parser = argparse.ArgumentParser(prog="policy_worker", description=__doc__)
    parser.add_argument("config", type=Path, help="TOML file of the run")
    parser.add_argument("--controllers", required=True, help="host:port of each, comma-separated")
    parser.add_argument("--id", default="policy-0", help="stable name of this worker")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", dest="overrides")
    parser.add_argument(
        "--run-dir", type=Path, help="for checkpoints; default: what the controller says"
    )
    parser.add_argument(
        "--tensor-host", help="address at which other workers reach this one; default: found out"
    )
    options = parser.parse_args(arguments)

    from paceline.config.load import load_config

    search_start_directory_last()
    config = load_config(options.config, options.overrides)
    # Before torch is imported: its thread pools are sized once.
    threads = str(config.fleet.policy_threads)
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = threads

    from policy_worker.main import run

    return run(
        config,
        controllers=[a.strip() for a in options.controllers.split(",") if a.strip()],
        worker_id=options.id,
        run_dir=options.run_dir,
        tensor_host=options.tensor_host,
    )


if __name__ == "__main__":
    leave_after(main, "policy_worker")
