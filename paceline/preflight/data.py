"""Checks of the data sets that a run reads: files, or names of the hub."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

from paceline.config.schema import Config
from paceline.config.training import DataConfig
from paceline.dataset.rows import DataError, Row, check_rows, could_be_hub_name, load_rows
from paceline.preflight.check import CORRECT, Problem
from paceline.preflight.deadline import NoAnswer, read_in_time
from paceline.preflight.hub import CHECK_HUB, hub_silence, only_cache


def data_problems(config: Config) -> tuple[Row | None, list[Problem]]:
    """The first row to train with, if it can be read, and what is wrong with the data."""
    data = config.data
    first_row, problems = _checked("data.path", data.path, data.split, data)
    if data.eval_path is not None:
        problems += _checked("data.eval_path", data.eval_path, data.eval_split, data)[1]
    return first_row, problems


def _checked(
    setting: str, path: str, split: str, data: DataConfig
) -> tuple[Row | None, list[Problem]]:
    what, silence = f"{setting}: {path}", ""
    try:
        # A dead mount is noticed by one small read: the whole data may take as long as a controller allows.
        if not read_in_time(what, lambda: _touch(path)) and could_be_hub_name(path):
            silence = _hub_silence(path)

        def load() -> Row:
            with only_cache() if silence else nullcontext():
                rows = load_rows(path, name=data.name, split=split)
            check_rows(rows, data)
            return rows[0]

        remedy = "Check the mount or the network behind it, or raise data.open_timeout_s"
        return read_in_time(what, load, remedy=remedy, limit_s=data.open_timeout_s), []
    except DataError as error:
        if silence:
            return None, [(f"{what}: not in the hub's cache, and {silence}", CHECK_HUB)]
        return None, [(f"{setting}: {error}", CORRECT)]
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
