"""``python -m controller CONFIG --id controller-0``: starts one controller process."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import threading
from pathlib import Path
from typing import NoReturn

from paceline.config.load import ConfigError, load_config
from paceline.process.structured_log import setup


def main(argv: list[str] | None = None) -> int:
    """Exit status 0 after SIGTERM, 2 for bad input (one clear line)."""
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
    try:
        config = load_config(arguments.config, arguments.overrides)
    except ConfigError as error:
        print(f"controller: {error}", file=sys.stderr)
        return 2
    # After the config: a typo in it is told without loading gRPC.
    from controller.errors import BadStart
    from controller.process import serve

    try:
        asyncio.run(
            serve(
                config,
                run_dir=arguments.run_dir or Path("runs") / config.run.name,
                controller_id=arguments.id,
                port=arguments.port,
                advertise=arguments.advertise,
            )
        )
    except BadStart as error:
        print(f"controller: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        pass
    return 0


def leave(status: int) -> NoReturn:
    """Ends the process, also where a sink's library would hold it up for an upload that gets nowhere."""
    if any(t.name.startswith("sink-") for t in threading.enumerate()):
        logging.shutdown()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    leave(main())
