"""Tables of the documentation, rendered from the results of benchmarks.

    python -m benchmarks.docs_tables            writes them between their marks in the pages
    python -m benchmarks.docs_tables --check    exit status 1 if a page differs

Pages are docs/ and README.md. The table of a mark is ``benchmarks/tables/MARK.j2``; its ``data`` is
``benchmarks/results/MARK.json`` or the file that the template names with ``results``.
"""

import argparse
import json
import re
import statistics
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import jinja2

from benchmarks.attribution import verdict
from benchmarks.scaling import report

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MEASUREMENTS = tomllib.loads((ROOT / "benchmarks" / "learning" / "arms.toml").read_text())
TEMPLATES = ROOT / "benchmarks" / "tables"
MARKED = re.compile(r"(<!-- (\w+) table: begin -->\n).*?(<!-- \2 table: end -->)", re.DOTALL)


def results(name: str, without: Any = None) -> Any:
    """The result file ``name``; ``without``, if it is given and there is no such file."""
    path = RESULTS / f"{name}.json"
    return without if without is not None and not path.exists() else json.loads(path.read_text())


def environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "f": format,
        "short": lambda value: f"{value:,.0f}" if value >= 10 else f"{value:.2g}",
        "mean": statistics.fmean,
        "median": statistics.median,
        "bullets": bullets,
    }
    made.globals |= {
        "results": results,
        "gain": lambda modes: modes["4"]["samples_per_s"] / modes["0"]["samples_per_s"],
        "attribution_rows": verdict.rows,
        "scaling": report,
        "ppo_gains": ppo_gains,
        "arms": lambda name: MEASUREMENTS[name]["arms"],
        "cosmos_rl": tomllib.loads((ROOT / "paceline_launcher/cli/cosmos_rl.toml").read_text()),
        "faults": tomllib.loads((ROOT / "benchmarks" / "recovery" / "faults.toml").read_text()),
    }
    return made


def ppo_gains(measured: dict[str, Any]) -> list[tuple[str, float]]:
    """By size, how many times as many samples/s Paceline has as the faster process in turn."""
    paces: dict[str, dict[str, list[float]]] = {}
    for row in measured["runs"]:
        system = paces.setdefault(row["size"], {}).setdefault(row["system"], [])
        system.append(row["samples_per_s"])
    found = []
    for size, pace in paces.items():
        rates = {name: statistics.median(rows) for name, rows in pace.items()}
        in_turn = [rate for name, rate in rates.items() if name.startswith("in turn")]
        if in_turn and "Paceline" in rates:
            found.append((size, rates["Paceline"] / max(in_turn)))
    return found


def bullets(text: str) -> str:
    return "\n".join(
        textwrap.fill(line, 120, initial_indent="- ", subsequent_indent="  ")
        for line in text.splitlines()
    )


def current(text: str, templates: jinja2.Environment) -> str:
    """``text`` of a page with its tables as the results say."""

    def table(mark: re.Match[str]) -> str:
        name = mark[2]
        if not (TEMPLATES / f"{name}.j2").exists():
            return mark[0]
        data = results(name, {})
        made = templates.get_template(f"{name}.j2").render(data=data)
        return mark[1] + made.strip() + "\n" + mark[3]

    return MARKED.sub(table, text)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    templates = environment()
    stale = False
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = page.read_text()
        made = current(text, templates)
        if made == text:
            continue
        stale = True
        if not check:
            page.write_text(made)
        print(f"{page.relative_to(ROOT)}: {'not current' if check else 'written'}")
    return int(check and stale)


if __name__ == "__main__":
    sys.exit(main())
