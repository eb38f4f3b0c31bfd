"""Every kind of data set gives the same rows, in the same order, under the same promises."""

import datetime
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.config.sections.inputs import DataConfig
from paceline.dataset.rows import DataError, load_rows
from paceline.dataset.training_rows import check_rows
from tests.fixtures.golden import Golden

ROWS = [{"prompt": f"s{n}=", "answer": str(n), "level": n % 3} for n in range(500)]


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_parquet(path: Path, rows: list[dict], **options) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path, **options)
    return path


def jsonl(directory: Path) -> Path:
    return write_jsonl(directory / "rows.jsonl", ROWS)


def parquet(directory: Path) -> Path:
    return write_parquet(directory / "rows.parquet", ROWS, row_group_size=64)


def directory_of(first, second):
    def write(directory: Path) -> Path:
        for name, writer, rows in (("a", first, ROWS[:200]), ("b", second, ROWS[200:])):
            suffix = "jsonl" if writer is write_jsonl else "parquet"
            writer(directory / "parts" / f"{name}.{suffix}", rows)
        return directory / "parts"

    return write


def saved_to_disk(directory: Path) -> Path:
    import datasets

    datasets.Dataset.from_list(ROWS).save_to_disk(str(directory / "saved"))
    return directory / "saved"


def saved_splits(directory: Path) -> Path:
    import datasets

    # Stored reversed and selected back, so that an indices mapping has to be followed.
    train = datasets.Dataset.from_list(ROWS[::-1]).select(range(len(ROWS) - 1, -1, -1))
    test = datasets.Dataset.from_list(ROWS[:5])
    datasets.DatasetDict({"train": train, "test": test}).save_to_disk(str(directory / "saved"))
    return directory / "saved"


KINDS = {
    "jsonl": jsonl,
    "directory of jsonl": directory_of(write_jsonl, write_jsonl),
    "parquet": parquet,
    "directory of parquet": directory_of(write_parquet, write_parquet),
    "mixed directory": directory_of(write_parquet, write_jsonl),
    "saved": saved_to_disk,
    "saved splits": saved_splits,
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_kind_gives_the_same_rows_in_order(kind, tmp_path):
    rows = load_rows(kind(tmp_path / "here"))
    assert [rows[i] for i in range(len(rows))] == ROWS
    assert rows[7] == ROWS[7]
    for outside in (-1, 500):
        with pytest.raises(IndexError):
            rows[outside]
    check_rows(rows, DataConfig(path="rows"))
    check_rows(rows, DataConfig(path="rows", answer_field=None))
    with pytest.raises(DataError, match=r"no field 'question'.*prompt, answer, level"):
        check_rows(rows, DataConfig(path="rows", prompt_field="question"))
    # Of the content, and not of the place.
    assert rows.digest == load_rows(kind(tmp_path / "there")).digest
    assert len(rows.digest) == 32


def test_digest_differs_when_one_row_differs(tmp_path):
    changed = [*ROWS[:250], {**ROWS[250], "answer": "?"}, *ROWS[251:]]
    for name, write in (("a.jsonl", write_jsonl), ("a.parquet", write_parquet)):
        before = load_rows(write(tmp_path / name, ROWS)).digest
        assert load_rows(write(tmp_path / name, changed)).digest != before


LINE = '{"prompt": "x"}\n\n'
BAD = {
    "field.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS[:3])
    + '{"prompt": "x", "level": 1}',
    "empty.jsonl": "\n",
    "list.json": json.dumps(ROWS[:2], indent=2),
    "rows.csv": "a,b\n",
    "bad.parquet": "PAR1 not really",
    "long.jsonl": '{"a": %s}\n' % ("7" * 5000),
    "cut.jsonl": LINE + '{"prompt": "x"',
    "array.jsonl": LINE + "[1]",
    "null.jsonl": LINE + "null",
    "latin.jsonl": LINE + '{"prompt": \xff}',
    # Every rollout worker ended on them, and so did the run, at each start anew.
    "escaped.jsonl": LINE + r'{"unused": "\ud83d"}',
    "pair_and_half.jsonl": LINE + r'{"unused": "ok \uD83D\ude00 \uDE00"}',
    "raw.jsonl": LINE + '{"unused": "\xed\xa0\xbd"}',
    "nested.jsonl": LINE + r'{"info": {"tags": [1, {"name": "\udc00"}]}}',
    "key.jsonl": LINE + r'{"info": {"\udc00": 1}}',
}


def test_what_cannot_be_used_is_refused_at_the_start_in_one_line_with_its_place(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for name, text in BAD.items():
        Path(name).write_bytes(text.encode("latin-1"))
    write_parquet(Path("none.parquet"), [])
    Path("nothing").mkdir()
    told = {}
    for name in ("missing.jsonl", "none.parquet", "nothing", *BAD):
        with pytest.raises(DataError) as error:
            rows = load_rows(Path(name))
            assert name == "field.jsonl"
            check_rows(rows, DataConfig(path="rows"))
        said = str(error.value).replace(str(tmp_path), "here")
        # But for the words of a library.
        told[f"data.path = {name}"] = re.sub("(?<=as Parquet: ).+", "", said)
        assert "\n" not in str(error.value)
    Golden("data").check_all(told)


def test_blank_lines_and_a_missing_last_newline_change_no_row(tmp_path):
    path = tmp_path / "rows.jsonl"
    text = '\n{"a": "\\ud83d\\ude00"}\n\n  \n{"a": "\u00e9\u2028"}'
    path.write_text(text, encoding="utf-8")
    rows = load_rows(path)
    assert [rows[0], rows[1]] == [{"a": "\U0001f600"}, {"a": "\u00e9\u2028"}], "a pair is text"


def test_files_of_another_split_are_never_mixed_in(tmp_path):
    write_jsonl(tmp_path / "data" / "train-00000-of-00001.jsonl", ROWS[:400])
    write_jsonl(tmp_path / "data" / "test.jsonl", ROWS[400:])
    assert len(load_rows(tmp_path)) == 400
    assert len(load_rows(tmp_path, split="test")) == 100
    with pytest.raises(DataError, match="no files of the split 'dev'; splits there: test, train"):
        load_rows(tmp_path, split="dev")
    saved = saved_splits(tmp_path / "other")
    assert len(load_rows(saved, split="test")) == 5
    with pytest.raises(DataError, match="no split 'dev'; splits there: train, test"):
        load_rows(saved, split="dev")


def test_values_json_cannot_hold_are_made_plain(tmp_path):
    row = {
        "when": datetime.datetime(2024, 1, 2, 3, 4, 5),
        "raw": b"\x00\xff",
        "score": float("nan"),
        "nested": {"list": [1.5, None]},
    }
    value = load_rows(write_parquet(tmp_path / "rows.parquet", [row]))[0]
    assert json.loads(json.dumps(value, allow_nan=False)) == {
        "when": "2024-01-02T03:04:05",
        "raw": "AP8=",
        "score": None,
        "nested": {"list": [1.5, None]},
    }


def test_a_file_replaced_during_the_run_does_not_change_the_rows(tmp_path):
    path = jsonl(tmp_path)
    rows = load_rows(path)
    other = write_jsonl(tmp_path / "other.jsonl", [{"prompt": "other", "answer": "other"}])
    other.replace(path)
    assert rows[321] == ROWS[321]


def large_jsonl(directory: Path) -> Path:
    path = directory / "rows.jsonl"
    path.write_text((json.dumps({"prompt": "x" * 4000}) + "\n") * 10_000)  # 40 MB
    return path


@pytest.mark.parametrize("kind", [large_jsonl, parquet, saved_to_disk])
def test_no_kind_of_data_imports_torch_and_jsonl_costs_offsets_in_memory_not_text(kind, tmp_path):
    script = (
        "import sys\n"
        "from paceline.dataset.rows import load_rows\n"
        # Not getrusage: its peak survives fork and exec, so it would be that of the test runner.
        "status = lambda: dict(x.split(':', 1) for x in open('/proc/self/status'))\n"
        "peak = lambda: int(status()['VmHWM'].split()[0]) / 1024\n"
        "before = peak()\n"
        "rows = load_rows(sys.argv[1])\n"
        "assert rows[len(rows) - 1]\n"
        "heavy = {'pyarrow', 'datasets', 'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
        "print(peak() - before, *heavy)\n"
    )
    command = [sys.executable, "-c", script, str(kind(tmp_path))]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    mib, *heavy = shown.stdout.split()
    assert not {"torch", "transformers"} & set(heavy) and shown.stderr == ""
    if kind is large_jsonl:
        assert heavy == [] and float(mib) < 10
