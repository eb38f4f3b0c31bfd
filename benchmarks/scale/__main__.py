"""Scale of the fleet on one machine: operations of a large fleet, measured without its
accelerators.

python -m benchmarks.scale fleet     the leader's work for 1,000 rollout workers and 64 replicas
python -m benchmarks.scale fetch     all replicas read the payloads of a large step at once
python -m benchmarks.scale COMMAND --help
"""

from __future__ import annotations

import sys

from benchmarks.scale import fetch, fleet

COMMANDS = {"fetch": fetch.main, "fleet": fleet.main}


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in COMMANDS:
        print(__doc__)
        sys.exit(f"name a command: one of {', '.join(COMMANDS)}")
    COMMANDS[name](sys.argv[2:])


if __name__ == "__main__":
    main()
