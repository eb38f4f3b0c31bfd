"""A row becomes plain text or chat messages, in whatever form it is written."""

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from paceline.config.sections.inputs import DataConfig
from paceline.dataset.messages import BadMessage, normal_message
from paceline.dataset.rows import DataError, load_rows
from paceline.dataset.training_rows import check_rows


def data(**settings) -> DataConfig:
    return DataConfig(path="rows.jsonl", **settings)


def test_a_prompt_that_no_row_can_give_is_refused_at_the_start(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "hi", "answer": "x"}\n')
    rows = load_rows(path)
    check_rows(rows, data())
    with pytest.raises(DataError, match=r"rows.jsonl:1: no field 'question'"):
        check_rows(rows, data(prompt_field="question"))


PARTS = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, "c"]
CALL = [{"type": "function", "function": {"name": "f", "arguments": {"query": "a"}}}]


@pytest.mark.parametrize(
    ("message", "content"),
    [
        ({"role": "user", "content": PARTS}, "abc"),
        ({"role": "assistant", "content": None, "tool_calls": CALL}, ""),
        ({"role": "assistant", "tool_calls": CALL}, ""),
        ({"role": "user", "content": "a", "name": None, "tool_calls": None}, "a"),
    ],
)
def test_content_becomes_text(message: dict[str, Any], content: str) -> None:
    normal = normal_message(message)
    assert normal["content"] == content
    assert None not in normal.values()
    assert normal.get("tool_calls") == message.get("tool_calls")


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "image_url"),
        ({"role": "user", "content": [{"type": "audio", "text": "a"}]}, "audio"),
        ({"role": "user", "content": [None]}, "NoneType"),
        ({"role": "user", "content": 4}, "int"),
        ({"role": "user", "content": None}, "user has no content"),
        ({"content": "a"}, "role and content"),
        ("text", "role and content"),
    ],
)
def test_what_is_not_text_is_refused_by_name(message: Any, words: str) -> None:
    with pytest.raises(BadMessage, match=words):
        normal_message(message)


def test_fields_that_parquet_fills_are_not_content(tmp_path: Path) -> None:
    calls = [[{"query": "a"}], [{"a": 1}]]
    parquet.write_table(pa.table({"calls": calls, "answer": ["x", None]}), tmp_path / "a.parquet")
    rows = load_rows(tmp_path)
    assert [rows[i] for i in range(2)] == [
        {"calls": [{"query": "a"}], "answer": "x"},
        {"calls": [{"a": 1}], "answer": None},
    ]


def test_linked_directories_are_followed(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "more").mkdir()
    for folder in ("data", "more"):
        (tmp_path / folder / "rows.jsonl").write_text('{"p": 1}\n')
    (tmp_path / "data" / "linked").symlink_to(tmp_path / "more")
    # A description beside the data is no row.
    (tmp_path / "data" / "dataset_infos.json").write_text('{"default": {}}')
    assert len(load_rows(tmp_path / "data")) == 2
    (tmp_path / "more" / "back").symlink_to(tmp_path / "data")
    assert len(load_rows(tmp_path / "data")) == 2, "a link that leads back adds nothing"


@pytest.mark.parametrize("name", ["a.jsonl.gz", "c.JSONL", "pipe.jsonl", "part", "d.jsonl"])
def test_nothing_in_a_directory_is_left_out_without_a_word(tmp_path: Path, name: str) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "README.md").write_text("Rows.")
    assert len(load_rows(tmp_path)) == 1
    path = tmp_path / name
    if name.startswith("pipe"):
        os.mkfifo(path)
    elif name in ("part", "d.jsonl"):
        path.symlink_to(tmp_path / "is not mounted")
    else:
        path.write_text('{"prompt": "b"}\n')
    with pytest.raises(DataError, match=f"{name}: (its rows would|is no file)"):
        load_rows(tmp_path)
