"""Warnings about scorers that nothing reads, and refusals of scorers without workers."""

from typing import Any

import pytest
from pydantic import ValidationError

from paceline.config.schema import Config
from paceline_launcher.preflight.earlier_run import config_warnings
from tests.fixtures.configs import config_of

MODEL = {"kind": "reward_model", "path": "/rm"}
LOGPROBS = {"kind": "logprobs", "path": "/large"}


def config(scorer: dict[str, Any], **sections: Any) -> Config:
    reward = {"reward": {"functions": ["exact_match"]}}
    return config_of(scorers={"helpful": scorer}, **reward | sections)


def warned(of: Config) -> list[str]:
    found = [check for check in config_warnings(of) if check.state == "warn"]
    assert all(check.remedy for check in found)
    return [check.found for check in found if "scorers.helpful" in check.found]


TRUTH = {"path": "rows.jsonl", "reward": ["scorer:helpful"]}


@pytest.mark.parametrize(
    ("scorer", "sections", "count"),
    [
        (MODEL, {}, 1),
        (LOGPROBS, {}, 1),
        (MODEL, {"reward": {"functions": ["scorer:helpful"]}}, 0),
        (MODEL, {"evaluation": {"sets": {"truth": TRUTH}}}, 0),
        (LOGPROBS, {"train": {"loss": {"reference": "scorer:helpful", "kl_coef": 0.1}}}, 0),
        (LOGPROBS, {"train": {"algorithm": "distill"}, "objective": {"teacher": "helpful"}}, 0),
        (LOGPROBS, {"train": {"algorithm": "mine:Objective"}}, 0),
    ],
)
def test_a_scorer_is_named_if_nothing_uses_it(
    scorer: dict[str, Any], sections: dict[str, Any], count: int
) -> None:
    assert len(warned(config(scorer, **sections))) == count


@pytest.mark.parametrize("count", [0, {"helpful": 0}])
def test_a_scorer_without_workers_is_refused(count: object) -> None:
    with pytest.raises(ValidationError, match=r"fleet\.scorers"):
        config(MODEL, fleet={"scorers": count})
