"""Recovery times of a real fleet after each fault.

    python -m benchmarks.recovery [--faults leader-kill,policy-reduce] [--trials 20] [--table | --check]

The fleet has a tiny model and the default leases: Redis, 2 controllers, 2 policy replicas (or as
many as the fault needs) and 2 rollout workers, restarted by a supervisor. For faults of the
network, every process is started by hand in a network namespace of its own (needs root). Each trial
waits until the fleet is complete, injects one fault, and reads the journal. Times are the leader's
own, from the fault to the event that shows detection and to the event that shows recovery.
``--table`` only writes the table of docs/fault-tolerance.md from the existing results; ``--check``
writes nothing, and the exit status is 1 if the table is not current or a fault was never measured.
Results of faults that are not measured this time are kept.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from benchmarks.recovery import table
from benchmarks.recovery.fleet_fixtures import HOSTS, Ground
from benchmarks.recovery.matrix import CASES
from benchmarks.runs import RESULTS
from testbed.faults.network_namespaces import why_not

OUT = RESULTS / "recovery.json"
SHOWN = ("trials", "detect_median_s", "recover_median_s", "recover_p99_s", "repeated")
START_LIMIT_S = 180.0


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", default=",".join(CASES), help="comma-separated, of the table")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--table", action="store_true", help="write the page's table only")
    parser.add_argument(
        "--check", action="store_true", help="write nothing, check the page's table"
    )
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    names = [name for name in args.faults.split(",") if name]
    if unknown := set(names) - set(CASES):
        sys.exit(f"--faults: unknown {', '.join(sorted(unknown))}; known: {', '.join(CASES)}")
    if args.trials < 1:
        sys.exit("--trials: at least 1")
    if args.check:
        rows = json.loads(args.out.read_text())
        if unmeasured := CASES.keys() - rows.keys():
            sys.exit(f"never measured: {', '.join(sorted(unmeasured))}")
        if gone := rows.keys() - CASES.keys():
            sys.exit(f"no longer faults of the table: {', '.join(sorted(gone))}")
        if table.PAGE.read_text() != table.page(rows, CASES):
            sys.exit(f"{table.PAGE}: not current; run `python -m benchmarks.recovery --table`")
        return
    if not args.table:
        measure(names, args.trials, args.out)
    rows = json.loads(args.out.read_text())
    table.PAGE.write_text(table.page(rows, CASES))
    print(f"table written to {table.PAGE}")


def measure(names: list[str], trials: int, out: Path) -> None:
    for ground in dict.fromkeys(CASES[name].ground for name in names):
        there = [name for name in names if CASES[name].ground == ground]
        if ground == HOSTS and (why := why_not()):
            print(f"left out: {', '.join(there)}: {why}", flush=True)
            continue
        measure_on(ground, there, trials, out)


def measure_on(ground: Ground, names: list[str], trials: int, out: Path) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="paceline-recovery-") as where,
        ground.open(Path(where)) as fleet,
    ):
        for name in names:
            found = []
            for _ in range(trials):
                fleet.settled(START_LIMIT_S)
                found.append(CASES[name].run(fleet))
            row = table.summarise(found)
            table.store(out, name, row, CASES)
            print(f"{name:<18} {json.dumps({k: row[k] for k in SHOWN})}", flush=True)
            fleet.assert_sound()
        fleet.settled(START_LIMIT_S)
        print(f"ledger: {json.dumps(fleet.assert_sound())}", flush=True)


if __name__ == "__main__":
    main()
