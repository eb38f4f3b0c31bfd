"""Checks of the data sets that a run reads: files, or names of the hub."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from paceline.config.schema import Config
from paceline.config.sections.training import DataConfig
from paceline.dataset.recorded_rows import check_run_rows
from paceline.dataset.rows import (
    DataError,
    Row,
    RowSource,
    could_be_hub_name,
    load_rows,
)
from paceline.dataset.training_rows import open_source, open_training_rows
from paceline_launcher.preflight.check import CORRECT, Problem
from paceline_launcher.preflight.deadline import NoAnswer, read_in_time
from paceline_launcher.preflight.inputs.hub import CHECK_HUB, hub_silence, only_cache


@dataclass(frozen=True, slots=True)
class FoundData:
    first_row: Row | None
    """To train with, if it can be read."""
    rows: int
    """To train with; 0 if they cannot be read."""
    problems: list[Problem]


def check_data(config: Config) -> FoundData:
    data = config.data
    problems: list[Problem] = []
    read: list[RowSource] = []
    for setting, path, load in _training(data):
        rows, found = _checked(setting, path, data, load)
        read += [rows] if rows is not None else []
        problems += found
    if data.eval_path is not None:
        opens = _opens(data.eval_path, data.eval_split, data)
        problems += _checked("data.eval_path", data.eval_path, data, opens)[1]
    for name, each in config.evaluation.sets.items():
        opens = _opens(each.path, each.split, each.data(data))
        problems += _checked(f"evaluation.sets.{name}.path", each.path, data, opens)[1]
    return FoundData(read[0][0] if read else None, sum(map(len, read)), problems)


def _opens(path: str, split: str, data: DataConfig) -> Callable[[], RowSource]:
    def load() -> RowSource:
        rows = load_rows(path, name=data.name, split=split)
        check_run_rows(rows, data)
        return rows

    return load


def _training(data: DataConfig) -> Iterator[tuple[str, str, Callable[[], RowSource]]]:
    """(setting, path, how it is opened) of each source."""
    if data.path is not None:
        yield "data.path", data.path, lambda: open_training_rows(data).rows
    for name, source in sorted(data.sources.items()):
        yield (
            f"data.sources.{name}",
            source.path,
            functools.partial(open_source, name, source, data),
        )


def _checked(
    setting: str, path: str, data: DataConfig, load: Callable[[], RowSource]
) -> tuple[RowSource | None, list[Problem]]:
    what, silence = f"{setting}: {path}", ""
    try:
        # A dead mount is noticed by one small read: the whole data may take as long as a controller
        # allows.
        if not read_in_time(what, lambda: _touch(path)) and could_be_hub_name(path):
            silence = _hub_silence(path)

        def opened() -> RowSource:
            with only_cache() if silence else nullcontext():
                return load()

        remedy = "Check the mount or the network behind it, or raise data.open_timeout_s"
        return read_in_time(what, opened, remedy=remedy, limit_s=data.open_timeout_s), []
    except DataError as error:
        if silence:
            return None, [(f"{what}: not in the hub's cache, and {silence}", CHECK_HUB)]
        said = str(error)
        named = said if said.startswith(setting) else f"{setting}: {said}"
        return None, [(named, CORRECT)]
    except NoAnswer as error:
        return None, [(error.found, error.remedy)]


def _hub_silence(name: str) -> str:
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return hub_silence(lambda hub, limit_s: hub.dataset_info(name, timeout=limit_s))
    except HfHubHTTPError:
        return ""  # opening the data says what it refuses


def _touch(path: str) -> bool:
    """Reads a little of a file or directory. False: there is none."""
    local = Path(path).expanduser()
    try:
        if local.is_file():
            with local.open("rb") as file:
                file.read(1)
        elif local.is_dir():
            with os.scandir(local) as entries:
                next(entries, None)
    except OSError:
        return True  # opening the data says so
    return local.exists()
