"""``python -m policy_worker CONFIG --controllers host:port,... --id policy-0``: one policy replica."""

from __future__ import annotations

from paceline.process.process_exit import leave_after
from paceline.process.role_main import RoleOptions, role_main


def start(options: RoleOptions) -> int:
    from policy_worker.main import run

    return run(
        options.config,
        controllers=options.controllers,
        worker_id=options.worker_id,
        run_dir=options.run_dir,
        tensor_host=options.tensor_host,
    )


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 after the run ended, 2 for bad input (one line on standard error), else 1."""
    return role_main(
        "policy",
        __doc__,
        start,
        threads=lambda config: config.fleet.policy_threads,
        run_dir_help="for checkpoints; default: the controller's run directory",
        arguments=arguments,
    )


if __name__ == "__main__":
    leave_after(main)
