r"""Rows to train on, from a data set in the layout of MATH-lighteval or of GSM8K.

    python -m examples.math.prepare data/MATH-lighteval --out data/math
    python -m examples.math.prepare openai/gsm8k --name main --layout gsm8k --out data/gsm8k

The source is a directory or a name of the Hugging Face hub, whose splits train and test become
``train.jsonl`` and ``test.jsonl``; or files (JSONL, Parquet), each of which becomes one of the same
name. A row of MATH has the fields problem, solution, level and type. It keeps them and gets
``answer``, the content of the last ``\boxed{...}`` of its solution. A row of GSM8K has question and
answer; it becomes one with problem, solution and answer, which is what follows ``####``. Rows
without an answer are left out and counted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from paceline.dataset.rows import DataError, Row, RowSource, load_rows
from paceline.errors import BadInput
from rollout_worker.rewards.builtin import last_boxed

SPLITS = ("train", "test")
SHOWN = 5
"""Rows without an answer whose numbers are printed."""


def math_row(row: Row) -> Row | None:
    """The row with its answer; None if its solution has none."""
    answer = last_boxed(str(row["solution"]))
    return {**row, "answer": answer} if answer else None


def gsm8k_row(row: Row) -> Row | None:
    """The same of a row whose answer is a solution that ends with ``#### 1,234``."""
    solution, found, answer = str(row["answer"]).rpartition("####")
    answer = answer.strip().replace(",", "")
    if not found or not answer:
        return None
    return {"problem": row["question"], "solution": solution.strip(), "answer": answer}


LAYOUTS: dict[str, tuple[tuple[str, ...], Callable[[Row], Row | None]]] = {
    "math": (("problem", "solution"), math_row),
    "gsm8k": (("question", "answer"), gsm8k_row),
}
"""Fields that every row of a layout has, and what makes the row to train on."""


def opened(source: str, name: str | None) -> Iterator[tuple[str, RowSource]]:
    """Each split of a source with its name. Raises DataError."""
    if Path(source).is_file():
        yield Path(source).stem, load_rows(source)
        return
    # The layout of the hub has each row once more in a folder for its subject.
    if (whole := Path(source) / "data").is_dir():
        source = str(whole)
    splits = [(split, load_rows(source, name=name, split=split)) for split in SPLITS]
    if len({rows.digest for _, rows in splits}) < len(splits):
        raise DataError(
            f"{source}: its files are not named for the splits {' and '.join(SPLITS)}, so both "
            "would have all rows. Name each file instead of the directory"
        )
    yield from splits


def prepared(rows: RowSource, layout: str) -> tuple[list[Row], list[int]]:
    """Rows to train on, and the numbers of those without an answer. Raises DataError."""
    fields, made_from = LAYOUTS[layout]
    for field in fields:
        if (place := rows.lacking(field)) is not None:
            raise DataError(
                f"{place}: a row has no field {field!r}; fields of every row: "
                f"{', '.join(rows.fields) or 'none'}. Rows of the layout {layout} have "
                f"{' and '.join(fields)}: choose another --layout"
            )
    found, without = list[Row](), list[int]()
    for number in range(len(rows)):
        row = made_from(rows[number])
        if row is None:
            without.append(number)
        else:
            found.append(row)
    if not found:
        raise DataError(
            f"{rows.where}: none of {len(rows)} rows has an answer. The layout math reads "
            f"\\boxed{{...}} in the field "
            "solution, and gsm8k what follows #### in the field answer: choose another --layout"
        )
    return found, without


def write(path: Path, rows: list[Row]) -> None:
    """All of the file or nothing: a file that is cut would be trained on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    part.replace(path)


def prepare(sources: list[str], layout: str, out: Path, name: str | None = None) -> None:
    """Raises DataError; nothing is written then."""
    made = [
        (out / f"{split}.jsonl", *prepared(rows, layout))
        for source in sources
        for split, rows in opened(source, name)
    ]
    for path, rows, without in made:
        write(path, rows)
        left_out = ""
        if without:
            numbers = ", ".join(map(str, without[:SHOWN])) + (", ..." if without[SHOWN:] else "")
            left_out = f"; {len(without)} without an answer left out (from 0: {numbers})"
        print(f"{path}: {len(rows)} rows{left_out}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="directory, hub name, or file")
    parser.add_argument("--out", type=Path, required=True, help="directory to write to")
    parser.add_argument("--layout", choices=LAYOUTS, default="math", help="default: math")
    parser.add_argument("--name", help="configuration of a data set of the hub")
    args: Any = parser.parse_args(arguments)
    try:
        prepare(args.sources, args.layout, args.out, args.name)
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
