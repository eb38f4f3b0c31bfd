"""Import check of one reward function, as the scoring processes import it.

    python -P -m rollout_worker.rewards.check package.module:function

Exit status 2, with one line on standard error, if the function cannot be used.
"""

from __future__ import annotations

import argparse

from paceline.process.lifetime import leave_after
from rollout_worker.rewards.functions import load


def main() -> int:
    parser = argparse.ArgumentParser(prog="rollout_worker.rewards.check", description=__doc__)
    parser.add_argument("function", help="a name of reward.functions")
    load([parser.parse_args().function])
    return 0


if __name__ == "__main__":
    leave_after(main, "check")
