"""Import check of an engine of the user's own, as a rollout worker imports it.

    python -P -m rollout_worker.engine.check package.module:Class

Exit status 2, with one line on standard error, if the engine cannot be used.
"""

from __future__ import annotations

import argparse

from paceline.process.lifetime import leave_after
from rollout_worker.engine.own_engine import own_engine


def main() -> int:
    parser = argparse.ArgumentParser(prog="rollout_worker.engine.check", description=__doc__)
    parser.add_argument("engine", help="package.module:Class, as in rollout.engine")
    own_engine(parser.parse_args().engine)
    return 0


if __name__ == "__main__":
    leave_after(main, "check")
