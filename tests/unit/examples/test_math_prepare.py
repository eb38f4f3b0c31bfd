"""Rows of the math example: answers out of solutions, from every form in which the data comes."""

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from examples.math.prepare import main

SOLVED = r"We have $\boxed{1}$, no: $\boxed{\frac{\sqrt{3}}{2}}$."


def row(number: int, solution: str = SOLVED) -> dict[str, Any]:
    return {
        "problem": f"problem {number}",
        "level": "Level 3",
        "type": "Algebra",
        "solution": solution,
    }


def write_hub_layout(directory: Path, **splits: list[dict[str, Any]]) -> Path:
    """A folder with all rows, and one for each subject that has them once more."""
    for folder in ("data", "algebra"):
        (directory / folder).mkdir(parents=True)
        for split, rows in splits.items():
            path = directory / folder / f"{split}-00000-of-00001.parquet"
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return directory


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_split_of_the_hubs_layout_becomes_a_file_with_every_row_once(tmp_path: Path) -> None:
    train, test = [row(n) for n in range(3)], [row(9)]
    source = write_hub_layout(tmp_path / "MATH", train=train, test=test)
    assert main([str(source), "--out", str(tmp_path / "out")]) == 0
    answer = {"answer": r"\frac{\sqrt{3}}{2}"}
    assert rows_of(tmp_path / "out" / "train.jsonl") == [one | answer for one in train]
    assert rows_of(tmp_path / "out" / "test.jsonl") == [one | answer for one in test]


def test_files_and_saved_data_sets_give_the_same_rows(tmp_path: Path) -> None:
    rows = [row(n) for n in range(3)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "held.parquet")
    both = datasets.DatasetDict(
        {
            split: datasets.Dataset.from_list(given)
            for split, given in (("train", rows), ("test", rows[:1]))
        }
    )
    both.save_to_disk(tmp_path / "saved")
    files = [str(tmp_path / name) for name in ("train.jsonl", "held.parquet")]
    assert main([*files, "--out", str(tmp_path / "a")]) == 0
    assert main([str(tmp_path / "saved"), "--out", str(tmp_path / "b")]) == 0
    written = [tmp_path / name for name in ("a/train.jsonl", "a/held.jsonl", "b/train.jsonl")]
    assert len({path.read_text() for path in written}) == 1
    assert len(rows_of(tmp_path / "b" / "test.jsonl")) == 1


def test_rows_without_an_answer_are_left_out_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    without = ["no box", r"cut: \boxed{4", r"empty: \boxed{}"]
    rows = [row(0), *(row(n, text) for n, text in enumerate(without, 1)), row(9)]
    source = tmp_path / "train.jsonl"
    source.write_text("".join(json.dumps(one) + "\n" for one in rows))
    assert main([str(source), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "2 rows; 3 without an answer left out (from 0: 1, 2, 3)" in said
    assert [one["problem"] for one in rows_of(tmp_path / "out" / "train.jsonl")] == [
        "problem 0",
        "problem 9",
    ]


def test_gsm8k_has_its_answer_after_four_hashes(tmp_path: Path) -> None:
    source = tmp_path / "train.jsonl"
    source.write_text(
        json.dumps({"question": "How many?", "answer": "First 3 <<1+2=3>>.\n#### 1,234"})
    )
    assert main([str(source), "--layout", "gsm8k", "--out", str(tmp_path / "out")]) == 0
    assert rows_of(tmp_path / "out" / "train.jsonl") == [
        {"problem": "How many?", "solution": "First 3 <<1+2=3>>.", "answer": "1234"}
    ]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([row(0, "nothing")], "none of 1 rows has an answer"),
        ([{"question": "q", "answer": "#### 4"}], "no field 'problem'"),
        ([], "no rows"),
    ],
)
def test_data_that_gives_no_row_is_one_clear_line_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: list[dict[str, Any]], words: str
) -> None:
    source = tmp_path / "train.jsonl"
    source.write_text("".join(json.dumps(one) + "\n" for one in rows))
    assert main([str(source), "--out", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and words in line
    assert not (tmp_path / "out").exists()


def test_a_directory_without_splits_is_refused_instead_of_held_out_rows_being_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "rows.jsonl").write_text(json.dumps(row(0)) + "\n")
    assert main([str(tmp_path / "in"), "--out", str(tmp_path / "out")]) == 2
    assert "Name each file" in capsys.readouterr().err
