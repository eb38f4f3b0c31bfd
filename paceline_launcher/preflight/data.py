"""Checks of the data sets that a run reads: files, or names of the hub."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from paceline.config.schema import Config, length_in_words, run_steps
from paceline.dataset.rows import DataError, Row, RowSource
from paceline.dataset.training_rows import load_rows_of, open_source, open_training_rows
from paceline.errors import BadInput, plural
from paceline_launcher.preflight.findings import CORRECT, Finding, Findings, Start, fail, ok


@dataclass(frozen=True, slots=True)
class FoundData:
    findings: list[Finding]
    training: Sequence[RowSource] = ()
    """Rows to train with, of each source that could be read."""

    @property
    def first_row(self) -> Row | None:
        return self.training[0][0] if self.training else None


def open_data(config: Config) -> FoundData:
    data = config.data
    training: dict[str, Callable[[], RowSource]] = {
        f"data.sources.{name}": partial(open_source, name, source, data)
        for name, source in sorted(data.sources.items())
    }
    if data.path is not None:
        training["data.path"] = lambda: open_training_rows(data)[0]
    evaluated: dict[str, Callable[[], RowSource]] = {
        f"evaluation.sets.{name}.path": partial(
            load_rows_of, held.path, held.data(data), name=held.name, split=held.split
        )
        for name, held in config.evaluation.sets.items()
    }
    if data.eval_path is not None:
        evaluated["data.eval_path"] = partial(
            load_rows_of, data.eval_path, data, name=data.name, split=data.eval_split
        )
    findings: list[Finding] = []
    read: dict[str, RowSource] = {}
    for setting, load in (training | evaluated).items():
        try:
            read[setting] = load()
        except DataError as error:
            text = error.found
            text = text if text.startswith(setting) else f"{setting}: {text}"
            findings.append(fail(text, error.remedy or CORRECT))
    rows = [read[setting] for setting in training if setting in read]
    return FoundData(findings or [ok(plural(sum(map(len, rows)), "row"))], rows)


def run_length(start: Start) -> Findings:
    try:
        if rows := sum(map(len, start.data.training)):
            yield ok(length_in_words(start.config, rows))
    except BadInput as error:
        yield fail(str(error))


def steps_of(config: Config) -> int:
    """Steps of the run. Opens the data if train.epochs is its length. Raises BadInput."""
    rows = 0 if config.train.epochs is None else len(open_training_rows(config.data)[0])
    return run_steps(config, rows)
