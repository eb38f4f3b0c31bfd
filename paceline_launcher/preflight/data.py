"""Checks of the data sets that a run reads: files, or names of the hub."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config.run_length import length_in_words, run_steps
from paceline.config.schema import Config
from paceline.config.sections.training import DataConfig
from paceline.dataset.recorded_rows import check_run_rows
from paceline.dataset.rows import DataError, Row, RowSource, could_be_hub_name, load_rows
from paceline.dataset.training_rows import open_source, open_training_rows
from paceline.errors import BadInput
from paceline_launcher.preflight.findings import Finding, Findings, Start, fail, ok

HUB_S = 5.0
ANSWERS = 64  # Rows of a source whose answers are looked at
CHECK_HUB = (
    "Check HF_ENDPOINT and the network to the hub, or give a directory or file of this machine"
)


@dataclass(frozen=True, slots=True)
class FoundData:
    """The first row to train with, and how many there are; None and 0 if they cannot be read."""

    first_row: Row | None
    rows: int
    findings: list[Finding]
    training: Sequence[RowSource] = ()
    """Rows to train with, of each source that could be read."""

    def answers(self, field: str | None) -> Iterator[tuple[str, Any]]:
        """Answers of a few rows of each source, each with its place."""
        for rows in self.training if field else ():
            last = len(rows) - 1
            for index in sorted({n * last // (ANSWERS - 1) for n in range(ANSWERS)}):
                answer = rows[index].get(str(field))
                if isinstance(answer, str | int | float):
                    yield f"{rows.where}: row {index}", answer


def open_data(config: Config) -> FoundData:
    findings: list[Finding] = []
    read: list[RowSource] = []
    data = config.data
    for setting, path, load in _training(data):
        rows, found = _opened(setting, path, load)
        read += [rows] if rows is not None else []
        findings += found
    evaluated = [("data.eval_path", data.eval_path, data.eval_split, data)]
    for name, each in config.evaluation.sets.items():
        evaluated.append((f"evaluation.sets.{name}.path", each.path, each.split, each.data(data)))
    for setting, eval_path, split, settings in evaluated:
        if eval_path is not None:
            load = functools.partial(_load, eval_path, split, settings)
            findings += _opened(setting, eval_path, load)[1]
    rows_read = sum(map(len, read))
    found = findings or [ok(f"{rows_read} rows")]
    return FoundData(read[0][0] if read else None, rows_read, found, read)


def _load(path: str, split: str, data: DataConfig) -> RowSource:
    rows = load_rows(path, name=data.name, split=split)
    check_run_rows(rows, data)
    return rows


def _training(data: DataConfig) -> Iterator[tuple[str, str, Callable[[], RowSource]]]:
    if data.path is not None:
        yield "data.path", data.path, lambda: open_training_rows(data).rows
    for name, source in sorted(data.sources.items()):
        opens = functools.partial(open_source, name, source, data)
        yield f"data.sources.{name}", source.path, opens


def _opened(
    setting: str, path: str, load: Callable[[], RowSource]
) -> tuple[RowSource | None, list[Finding]]:
    silence = ""
    if not Path(path).expanduser().exists() and could_be_hub_name(path):
        silence = _hub_silence(path)
    try:
        with _only_cache() if silence else nullcontext():
            return load(), []
    except DataError as error:
        if silence:
            found = f"{setting}: {path}: not in the hub's cache, and {silence}"
            return None, [fail(found, CHECK_HUB)]
        text = str(error)
        return None, [fail(text if text.startswith(setting) else f"{setting}: {text}")]


def _hub_silence(name: str) -> str:
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return hub_silence(lambda hub: hub.dataset_info(name, timeout=HUB_S))
    except HfHubHTTPError:
        return ""  # opening the data says what it refuses


def hub_silence(ask: Callable[[Any], object]) -> str:
    """The reason why the hub does not answer ``ask(HfApi)``; else empty. HfHubHTTPError, an answer
    too, passes."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    if constants.HF_HUB_OFFLINE:
        return ""
    try:
        ask(HfApi())
    except HfHubHTTPError:
        raise
    except Exception as error:  # whatever the HTTP client raises for an unreachable hub
        return f"the hub {constants.ENDPOINT} does not answer: {str(error).partition(chr(10))[0]}"
    return ""


@contextmanager
def _only_cache() -> Iterator[None]:
    import datasets
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def run_length(start: Start) -> Findings:
    try:
        if start.data.rows:
            yield ok(length_in_words(start.config, start.data.rows))
    except BadInput as error:
        yield fail(str(error))


def steps_of(config: Config) -> int:
    """Steps of the run. Opens the data if train.epochs is its length. Raises BadInput."""
    rows = 0 if config.train.epochs is None else len(open_training_rows(config.data).rows)
    return run_steps(config, rows)
