"""``python -m controller CONFIG --id controller-0``: starts one controller process."""

import argparse
import asyncio
import sys
import threading
from pathlib import Path

import uvloop

from paceline.config.load import load_config
from paceline.process.files import set_process_limits
from paceline.process.lifetime import exit_status, leave
from paceline.process.structured_log import setup
from paceline.user_code import search_start_directory_last


def main(argv: list[str] | None = None) -> int:
    """Runs until SIGTERM. Raises UserError."""
    parser = argparse.ArgumentParser(prog="controller", description=__doc__)
    parser.add_argument("config", type=Path, help="the run's TOML file")
    parser.add_argument("--run-dir", type=Path, help="default: runs/<run.name>")
    parser.add_argument("--id", default="controller-0", help="name of this controller")
    parser.add_argument("--port", type=int, help="default: controller.port")
    parser.add_argument("--advertise", help="host under which other machines reach this one")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="A.B=C")
    parser.add_argument("--log-level", default="INFO")
    arguments = parser.parse_args(argv)
    setup(arguments.id, level=arguments.log_level)
    set_process_limits()
    search_start_directory_last()
    config = load_config(arguments.config, arguments.overrides)
    # After the config: a typo in it is reported without loading gRPC.
    from controller.process import serve

    # It handles a small message in half the time.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(
            serve(
                config,
                run_dir=arguments.run_dir or Path("runs") / config.run.name,
                controller_id=arguments.id,
                port=arguments.port,
                advertise=arguments.advertise,
            )
        )
    return 0


if __name__ == "__main__":
    status = exit_status(main, "controller")
    if any(thread.name.startswith("sink-") for thread in threading.enumerate()):
        # A sink's library would delay the exit for an upload that makes no progress.
        leave(status)
    sys.exit(status)
