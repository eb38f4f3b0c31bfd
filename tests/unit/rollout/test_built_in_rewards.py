"""A built-in reward is named once: settings, checks, the rollout worker and the pages follow that
list."""

import pytest

from paceline.config.sections.inputs import BUILT_IN_REWARDS
from rollout_worker.rewards.functions import load
from testbed.fleets.local_run import ROOT
from tests.fixtures.configs import config_of


@pytest.mark.parametrize("name", BUILT_IN_REWARDS)
def test_a_built_in_reward_is_loaded_explained_and_asks_for_answers(name: str) -> None:
    (reward,) = load([name])
    assert reward.component == name
    assert "answer" in (reward.accepts or ())
    for text in ("None", "\\boxed{None}"):
        assert reward.call(prompt="", completion=text, answer=None) == 0.0
    assert f"| `{name}` |" in (ROOT / "docs" / "rewards.md").read_text()
    with pytest.raises(ValueError, match="compares with the answer"):
        config_of(data={"answer_field": None}, reward={"functions": [name]})


def test_what_is_no_reward_is_refused_with_the_names_of_those_that_are() -> None:
    with pytest.raises(ValueError, match="Did you mean exact_match") as refused:
        config_of(reward={"functions": ["exact"]})
    assert all(name in str(refused.value) for name in BUILT_IN_REWARDS)
