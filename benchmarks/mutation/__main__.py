"""Mutation check: each guard that a promise depends on is removed, and its tests must fail.

    python -m benchmarks.mutation [--only fence,owner] [--check]

Works on a scratch copy of the tree; the tree itself is never changed. For each guard the copy is
patched, the tests that cover it run, and the patch is undone. Before that, the same tests must pass
on the unchanged copy. Exit status 0 only if every removal turns its tests red. The result is
benchmarks/results/mutation.json. ``--check`` runs no test: it only looks for the lines of each
guard, which must be there to be removed. The guards stand in guards.toml.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

from benchmarks.runs import REPOSITORY, RESULTS

OUT = RESULTS / "mutation.json"
COPIED = (
    *("benchmarks", "controller", "examples", "paceline", "paceline_launcher", "policy_worker"),
    *("proto", "rollout_worker", "scorer_worker", "testbed", "tests", "pyproject.toml"),
)
LIMIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Guard:
    """A check that a promise rests on, how to take it away, and the tests that must then fail."""

    name: str
    what: str
    patches: list[dict[str, str]]
    """File, old lines, and new lines that take the guard away."""
    tests: list[str]
    choose: str = ""
    """Expression for pytest -k."""


GUARDS = [
    Guard(name, **entry)
    for name, entry in tomllib.loads(Path(__file__).with_name("guards.toml").read_text()).items()
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="names of guards; results of others are kept")
    parser.add_argument("--check", action="store_true", help="only look for the guards' lines")
    args = parser.parse_args()
    if args.check:
        found = [missing(REPOSITORY, guard) for guard in GUARDS]
        sys.exit("\n".join(filter(None, found)) or 0)
    wanted = set(filter(None, args.only.split(",")))
    if unknown := wanted - {g.name for g in GUARDS}:
        sys.exit(f"--only: unknown {', '.join(sorted(unknown))}")
    rows = []
    with tempfile.TemporaryDirectory(prefix="paceline-mutation-") as name:
        tree = Path(name)
        copy_tree(tree)
        for guard in GUARDS:
            if wanted and guard.name not in wanted:
                continue
            row = judge(tree, guard)
            rows.append(row)
            print(f"{guard.name}: {'red' if row['red'] else 'NOT NOTICED'}", flush=True)
    results = {row["guard"]: row for row in json.loads(OUT.read_text())} if OUT.exists() else {}
    results |= {row["guard"]: row for row in rows}
    merged = [results[guard.name] for guard in GUARDS if guard.name in results]
    OUT.write_text(json.dumps(merged, indent=1) + "\n")
    sys.exit(0 if all(row["red"] for row in rows) else 1)


def copy_tree(tree: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc", "results", "runs")
    for name in COPIED:
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=ignored)
        else:
            shutil.copy2(source, tree / name)


def missing(tree: Path, guard: Guard) -> str:
    """The reason why the guard cannot be removed from ``tree``; empty if it can."""
    files = [
        p["file"] for p in guard.patches if (tree / p["file"]).read_text().count(p["old"]) != 1
    ]
    return f"{guard.name}: its lines are not (once) in {', '.join(files)}" if files else ""


def judge(tree: Path, guard: Guard) -> dict[str, object]:
    """Runs the guard's tests without and with the guard removed."""
    before, _ = run_tests(tree, guard)
    if before != 0:
        raise SystemExit(f"{guard.name}: its tests fail on the unchanged tree")
    if why := missing(tree, guard):
        raise SystemExit(why)
    originals = {p["file"]: (tree / p["file"]).read_text() for p in guard.patches}
    try:
        for patch in guard.patches:
            path = tree / patch["file"]
            path.write_text(path.read_text().replace(patch["old"], patch["new"]))
        status, failed = run_tests(tree, guard)
    finally:
        for file, text in originals.items():
            (tree / file).write_text(text)
    if status not in (0, 1):
        raise SystemExit(f"{guard.name}: its tests did not run once it was removed")
    return {"guard": guard.name, "what": guard.what, "red": status == 1, "failed": failed}


def run_tests(tree: Path, guard: Guard) -> tuple[int, list[str]]:
    """(exit status of pytest, names of the tests that failed)."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *guard.tests]
    if guard.choose:
        command += ["-k", guard.choose]
    done = subprocess.run(
        command,
        cwd=tree,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        # The copy must win over an installed project, in every process that a test starts.
        env={**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    failed = re.findall(r"^(?:FAILED|ERROR) \S+::(\S+)", done.stdout, re.MULTILINE)
    return done.returncode, failed


if __name__ == "__main__":
    main()
