"""Files of a user that are named like Paceline's packages never run in their place."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.fleets.local_run import Up, write_run
from tests.fixtures.wheel import PACKAGES, python_with_our_wheel

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

REWARD = """
import pathlib, sys
def digits(completion):
    return float(completion[:1].isdigit())
"""
OBJECTIVE = """
from paceline.config.fields import Section
from policy_worker.objectives.objective import Loss, Objective
class Mine(Objective):
    class Options(Section):
        scale: float
    def advantages(self, batch, totals):
        return self.options.scale * batch.reward
    def loss(self, scores, tokens):
        total = -(scores.logprobs * tokens.advantage * tokens.weight).sum()
        return Loss(total, {"mine": tokens.advantage})
"""
ENGINE = """
import pathlib
from rollout_worker.engine.transformers.engine import TransformersEngine
class Mine(TransformersEngine):
    def __init__(self, config, tokenizer):
        super().__init__(config, tokenizer)
        pathlib.Path(config.rollout.engine_options["note"]).write_text("made")
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return python_with_our_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def start_directory(tmp_path: Path) -> Iterator[Path]:
    """Has a file, or a package, of every name of ours; running one of them leaves a mark."""
    mark = f"open({str(tmp_path / 'ran')!r}, 'a').write(__file__)\n"
    for name in PACKAGES:
        (tmp_path / f"{name}.py").write_text(mark)
    package = tmp_path / "controller"
    package.mkdir()
    for name in ("__init__.py", "__main__.py"):
        (package / name).write_text(mark)
    (tmp_path / "my_reward.py").write_text(REWARD)
    (tmp_path / "my_objective.py").write_text(OBJECTIVE)
    (tmp_path / "my_engine.py").write_text(ENGINE)
    yield tmp_path
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()


@pytest.mark.long
def test_a_whole_run_uses_our_roles_and_the_users_reward_objective_and_engine(
    python: Path, start_directory: Path
) -> None:
    config = write_run(
        start_directory,
        reward={"functions": ["my_reward:digits"], "processes": 1},
        train={
            "steps": 2,
            "eval_every": 2,
            "checkpoint_every": 2,
            "algorithm": "my_objective:Mine",
        },
        objective={"scale": 3.0},
        rollout={
            "engine": "my_engine:Mine",
            "engine_options": {"note": str(start_directory / "note")},
        },
        fleet={"controllers": 1, "policy": 1, "policy_ranks": 2, "rollout": 1},
    )
    # As the console script starts it: without the start directory on the path.
    up = Up(config, start_directory / "run", python=(str(python), "-P"), cwd=start_directory)
    try:
        assert up.wait() == 0, up.said()
    finally:
        up.close()
    up.assert_sound()
    assert (start_directory / "note").read_text() == "made"
    # What it measures: three times the reward, which is 0 or 1 here.
    steps = [row for row in up.metrics() if row["kind"] == "step"]
    assert all(0 <= row["mine"] <= 3 for row in steps) and any(row["mine"] > 0 for row in steps)
