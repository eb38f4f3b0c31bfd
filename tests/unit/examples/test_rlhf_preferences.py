"""Preferences of the RLHF example: of two samples of one model a right one and a wrong one, for
prompts of their own."""

import json
from pathlib import Path

import pytest

from examples.digit_sort.make_data import HERE
from examples.rlhf import preferences
from testbed.tiny_model import make_tiny_model


def made(out: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    words = ["preferences", "--model", str(model), "--out", str(out)]
    monkeypatch.setattr("sys.argv", [*words, "--pairs", "24", "--held-out", "8"])
    return preferences.main()


def test_the_better_sample_is_right_and_prompts_are_in_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for again in ("a", "b"):
        assert made(tmp_path / again, HERE / "model-0.1M", monkeypatch) == 0
    assert "32 of 32 pairs" in capsys.readouterr().out
    files = [(tmp_path / again / "pairs.jsonl").read_text() for again in ("a", "b")]
    assert files[0] == files[1], "a stage that is begun again makes the same pairs"
    pairs, held_out = (
        [json.loads(line) for line in (tmp_path / "a" / name).read_text().splitlines()]
        for name in ("pairs.jsonl", "held_out_pairs.jsonl")
    )
    assert (len(pairs), len(held_out)) == (24, 8)
    for row in [*pairs, *held_out]:
        digits = row["prompt"].removeprefix("s").removesuffix("=")
        assert row["chosen"] == "".join(sorted(digits)) != row["rejected"]
    prompts = [row["prompt"] for row in [*pairs, *held_out]]
    assert len({*prompts}) == 32 and not {*prompts} & preferences.of_the_demo()


def test_a_model_that_is_never_right_is_told_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preferences, "MOST_BATCHES_IN_VAIN", 1)
    model = make_tiny_model(tmp_path / "model", hidden=32)
    assert made(tmp_path / "out", model, monkeypatch) == 1
    assert "no right and no wrong sample" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
