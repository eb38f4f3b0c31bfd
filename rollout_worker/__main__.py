"""``python -m rollout_worker CONFIG --controllers host:port,... --id rollout-0``: one rollout worker."""

from __future__ import annotations

from paceline.process.process_exit import leave_after
from paceline.process.role_main import RoleOptions, role_main


def start(options: RoleOptions) -> int:
    from rollout_worker.main import run

    return run(
        options.config,
        controllers=options.controllers,
        worker_id=options.worker_id,
        tensor_host=options.tensor_host,
    )


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 after the run ended, 2 for bad input (one line on standard error), 3 if the
    engine died while it generated, else 1."""
    return role_main(
        "rollout",
        __doc__,
        start,
        threads=lambda config: config.fleet.rollout_threads,
        run_dir_help="accepted for symmetry; nothing is written",
        arguments=arguments,
    )


if __name__ == "__main__":
    leave_after(main)
