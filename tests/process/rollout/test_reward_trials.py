"""A reward that fails is found before anything starts, with the line; and what it failed on in a
run is kept and can be called again."""

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.config.load import load_config
from paceline_launcher.cli import app
from paceline_launcher.preflight.findings import Finding
from rollout_worker.environments.base import EnvironmentTask, Sample
from rollout_worker.rewards.builtin import math_boxed, math_verify
from tests.fixtures.chat_model import make_chat_model
from tests.fixtures.environment_fixture import staged
from tests.fixtures.preflight import findings_of

MODULE = """
    import os, time

    class FunctionTimedOut(BaseException):
        pass

    def helper(row):
        return row["hints"]

    def fine(completion, answer):
        print("looked at", answer)
        return len(completion) + 0.5

    def broken(completion, row):
        return float(helper(row))

    def timed_out(completion):
        raise FunctionTimedOut

    def leaves(completion):
        os._exit(0)

    def sleeps(completion):
        time.sleep(60)

    def group(completions, answer):
        return [1.0 / (len(completions) - 1)] * len(completions)

    async def plays(task, sample):
        turn = await sample(task.prompt)
        return {"length": float(len(turn.text)), "hints": helper(task.row)}

    async def asks(task, sample):
        await sample(task.prompt)
        await sample("and?")
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes the configuration of a run with these rewards, and its data; returns its path."""
    (tmp_path / "trial_rewards.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])

    def write(*functions: str, row: dict[str, Any] | None = None, more: str = "") -> Path:
        rows = [row or {"prompt": "2+2", "answer": "4"}, {"prompt": "1+1", "answer": "2"}]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        names = json.dumps([f if ":" in f or "_" in f else f"trial_rewards:{f}" for f in functions])
        path = tmp_path / "run.toml"
        path.write_text(
            f'[model]\npath = "{tmp_path}/model"\n[data]\npath = "rows.jsonl"\n'
            f"[reward]\nfunctions = {names}\ntimeout_s = 2.0\n{more}"
        )
        return path

    return write


def trial_of(path: Path) -> list[Finding]:
    return findings_of(load_config(path), "rewards")


@pytest.mark.parametrize(
    ("name", "state", "said"),
    [
        ("broken", "fail", ["KeyError: 'hints' (trial_rewards.py:8 in helper)", "line 15, in br"]),
        ("trial_rewards:timed_out", "fail", ["FunctionTimedOut", "line 18, in timed_out"]),
        ("leaves", "fail", ["reward_crashed: the scoring process ended with status 0"]),
        ("sleeps", "warn", ["reward_timeout: a call took longer than 15 s"]),
    ],
)
def test_a_reward_that_fails_is_found_before_anything_starts(
    run: Any, name: str, state: str, said: list[str]
) -> None:
    (finding,) = trial_of(run("exact_match", name))
    assert finding.state == state, finding
    assert all(words in finding.found for words in said), finding.found
    assert "paceline check-reward" in finding.remedy


def test_rewards_that_are_fine_are_not_talked_about(run: Any) -> None:
    assert trial_of(run("fine", "group", "format:^4")) == []


def test_an_environment_is_tried_with_an_engine_that_says_one_thing(
    run: Any, tmp_path: Path
) -> None:
    make_chat_model(tmp_path / "model")
    played = '[rollout]\nenvironment = "trial_rewards:{}"\nmax_context = 200\n'
    (finding,) = trial_of(run("exact_match", more=played.format("plays")))
    assert finding.state == "fail" and "trial_rewards.py:8 in helper" in finding.found
    assert finding.found.startswith("rollout.environment: ")
    assert trial_of(run("exact_match", more=played.format("asks"))) == []


def test_one_row_and_one_completion_can_be_tried(run: Any, tmp_path: Path) -> None:
    call = CliRunner().invoke
    path = str(run("fine", "broken", row={"prompt": "2+2", "answer": "4", "hints": 3}))
    good = call(app, ["check-reward", path, "--completion", "four"])
    assert good.exit_code == 0, good.output
    assert "4.5  trial_rewards:fine" in good.output and "7.5  the reward" in good.output
    bad = call(app, ["check-reward", path, "--row", "1"])
    assert bad.exit_code == 1 and "trial_rewards.py:8 in helper" in bad.output
    assert "in broken" in bad.output and 'return row["hints"]' in bad.output
    assert call(app, ["check-reward", path, "--row", "2"]).exit_code != 0


async def test_what_a_reward_fails_on_in_a_run_is_named_and_traced_once(
    run: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def unscored(task: EnvironmentTask, sample: Sample) -> None:
        await sample(task.prompt)

    model = make_chat_model(tmp_path / "model")
    run("broken")
    reward = {"functions": ["trial_rewards:broken"]}
    async with staged(model, unscored, lambda prompt: "seven", reward=reward) as stage:
        refused = await stage.refusal()
        await stage.refusal()
    assert refused.reason == "reward_error"
    where = "KeyError: 'hints' (trial_rewards.py:8 in helper)"
    assert f"{where}, on completion 0 of row 0: 'seven'" in refused.detail
    traces = [r for r in caplog.records if "in helper\n" in r.getMessage()]
    assert len(traces) == 1, "once, however often it happens"


GOLDS = r"""
12 | -7 | 3.5 | 1/2 | -3/4 | 1,000 | 12,345.67 | 50\% | 50% | \frac{1}{2} | \frac12 | \dfrac{3}{4}
-\frac{5}{6} | 2\sqrt{3} | \sqrt{2} | 3+2\sqrt{5} | \frac{\sqrt{3}}{2} | \sqrt[3]{4} | \pi | 2\pi
\frac{\pi}{4} | 4\pi r^2 | x^2+1 | x^2 - 5x + 6 | 2x+3 | (x+1)(x-1) | x = 5 | y = 2x + 1 | (1, 2)
(-1, 3) | (1,2,3) | [0, 1] | (0, 1] | (-\infty, 3) | (-\infty, 0) \cup (2, \infty) | [-2, 2)
\{1, 2, 3\} | 1, 2, 3 | x < 3 | x \ge 2 | 2^{10} | 10^{-3} | 5 \times 10^3 | e^2 | \ln 2 | \log_2 3
\sin x | \frac{1}{x+1} | \begin{pmatrix} 1 \\ 2 \end{pmatrix} | 90^\circ | 60^{\circ} | \text{yes}
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} | \text{(A)} | A | \text{Monday} | 3! | \binom{5}{2}
n(n+1)/2 | \frac{n(n+1)}{2} | 1 + i | 2 - 3i | i | \$18 | \$1{,}500 | 5\text{ cm} | 10 \text{ m/s}
\frac{1}{3} \ln 2 | a^2 + b^2 | 7 \frac{1}{2} | $\frac{3}{7}$ | \boxed{17} | \(12\)
"""


@pytest.mark.parametrize(
    "gold", [g.strip() for line in GOLDS.split("\n") for g in line.split(" | ") if g.strip()]
)
def test_a_right_answer_equals_a_gold_however_it_is_written(gold: str) -> None:
    """Of 68 typical golds 41 right answers got 0, and a wrong one 1 for 2\\sqrt{3}."""
    inner = gold.strip("$").removeprefix("\\boxed{").removesuffix("}" if "box" in gold else "")
    inner = inner.removeprefix("\\(").removesuffix("\\)")
    right, wrong = rf"So the answer is $\boxed{{{inner}}}$.", r"So the answer is $\boxed{271828}$."
    for reward in (math_verify, math_boxed):
        assert reward(prompt="", completion=right, answer=gold) == 1
        assert reward(prompt="", completion=wrong, answer=gold) == 0


@pytest.mark.parametrize(
    ("gold", "value"),
    [
        (r"2\sqrt{3}", 0),
        ("48/2 = <<48/2=24>>24 clips in May.\n#### 2", 1),
        ("The answer is 2", 1),
        ("2.", 1),
        ("so $x=3$ and it is $2$", 1),
    ],
)
def test_a_part_of_a_gold_is_not_the_gold(gold: str, value: float) -> None:
    for reward in (math_verify, math_boxed):
        assert reward(prompt="", completion=r"\boxed{2}", answer=gold) == value


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("3.14e5", "314000"),
        ("1 000 000", "1000000"),
        (r"10\!\,000", "10000"),
        (["3", "4"], "4"),
    ],
)
def test_numbers_and_lists_of_golds_are_read_as_people_read_them(gold: Any, answer: str) -> None:
    for reward in (math_verify, math_boxed):
        assert reward(prompt="", completion=rf"\boxed{{{answer}}}", answer=gold) == 1
        assert reward(prompt="", completion=r"\boxed{271828}", answer=gold) == 0
