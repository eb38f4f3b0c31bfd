"""Size of the house: lines, files and folders that ship, and of what is beside them.

python -m testbed.house [CHECKOUT]
"""

import re
import subprocess
import sys
from pathlib import Path

SHIPPED = (
    *("controller", "policy_worker", "rollout_worker", "scorer_worker"),
    *("paceline", "paceline_launcher"),
)
TINY = 40
WIDTH = 100
HEADLESS = re.compile(r'^ *"""(Of|What|Whether|Those|Why|As|Whose|Which|Where) ', re.MULTILINE)


def texts(root: Path, *folders: str) -> dict[Path, str]:
    """The tracked Python files in ``folders``, without generated ones."""
    command = ["git", "-C", str(root), "ls-files", "--", *(f"{f}/*.py" for f in folders)]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return {Path(n): (root / n).read_text() for n in names if not n.startswith("paceline/v1/")}


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    shipped = texts(root, *SHIPPED)
    lines = {path: text.splitlines() for path, text in shipped.items()}
    rows = {
        "shipped lines": sum(map(len, lines.values())),
        "shipped files": len(lines),
        "shipped folders": len({path.parent for path in lines}),
        f"files of at most {TINY} lines": sum(len(text) <= TINY for text in lines.values()),
        "docstrings without a subject": sum(len(HEADLESS.findall(t)) for t in shipped.values()),
        f"lines over {WIDTH} columns": sum(len(row) > WIDTH for t in lines.values() for row in t),
    }
    rows |= {
        f"lines of {folder}": sum(len(text.splitlines()) for text in texts(root, folder).values())
        for folder in (*SHIPPED, "tests", "benchmarks", "testbed")
    }
    for name, count in rows.items():
        print(f"{name:<32}{count:>8,}")


if __name__ == "__main__":
    main()
