"""Time and result of the demo: ``make demo``, after the set-up.

    python -m benchmarks.demo

Seconds from the command to its end, with the start of the fleet and the answers of the exported
model; and what the run's summary says.
"""

import json
import subprocess
import sysconfig
import time
from pathlib import Path

from benchmarks import runs

KEPT = ("steps", "eval_first", "eval_last", "samples_lost", "samples_duplicated", "ledger_ok")


def main() -> None:
    args = runs.options("demo", __doc__, "demo").parse_args()
    machine, run_dir = runs.machine(), runs.SCRATCH / "demo"
    command = [str(Path(sysconfig.get_path("scripts")) / "paceline"), "demo"]
    begun = time.monotonic()
    subprocess.run([*command, "--run-dir", str(run_dir)], cwd=runs.REPOSITORY, check=True)
    seconds = round(time.monotonic() - begun, 1)
    summary = json.loads((run_dir / "summary.json").read_text())
    kept = {name: summary[name] for name in KEPT}
    runs.write(args.out, {"machine": machine, "seconds": seconds, **kept})


if __name__ == "__main__":
    main()
