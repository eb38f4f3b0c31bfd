"""Check of the first recorded row: what the model reads of it, and which tokens are trained."""

from __future__ import annotations

import json
from collections.abc import Iterator

from paceline.config.schema import Config
from paceline.dataset.rows import Row
from paceline_launcher.preflight.check import FIRST_ROW, Check, fail, ok
from paceline_launcher.preflight.inputs.import_check import import_check


def first_row(config: Config, row: Row | None) -> Iterator[Check]:
    """In a process of its own: a tokenizer loads torch, which the supervisor of a fleet does
    without."""
    if row is None or not config.recorded:
        return
    done = import_check(
        "paceline.recorded.check", config.model_dump_json(), given=json.dumps(row, default=str)
    )
    if done.problem:
        remedy = "Correct the row or the fields of [data] (docs/recorded-data.md)"
        source = "path" if config.data.path is not None else f"sources.{min(config.data.sources)}"
        yield fail(FIRST_ROW, f"data.{source}: {done.problem}", remedy)
        return
    yield ok(FIRST_ROW, "\n    ".join(done.said))
