"""Warnings about scorers that nothing reads, and refusals of scorers without workers."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from paceline.config.schema import Config
from paceline_launcher.preflight.earlier_run import config_warnings

MODEL = {"kind": "reward_model", "path": "/rm"}
LOGPROBS = {"kind": "logprobs", "path": "/large"}


def config(scorer: dict[str, Any], **sections: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "/m"},
            "data": {"path": "rows.jsonl"},
            "reward": {"functions": ["exact_match"]},
            "scorers": {"helpful": scorer},
            **sections,
        }
    )


def warned(of: Config) -> list[str]:
    found = [check for check in config_warnings(of) if check.state == "warn"]
    assert all(check.remedy for check in found)
    return [check.found for check in found if "scorers.helpful" in check.found]


@pytest.mark.parametrize("scorer", [MODEL, LOGPROBS])
def test_a_scorer_that_nothing_uses_is_named(scorer: dict[str, Any]) -> None:
    assert len(warned(config(scorer))) == 1


@pytest.mark.parametrize(
    ("scorer", "sections"),
    [
        (MODEL, {"reward": {"functions": ["scorer:helpful"]}}),
        (
            MODEL,
            {
                "evaluation": {
                    "sets": {"truth": {"path": "rows.jsonl", "reward": ["scorer:helpful"]}}
                }
            },
        ),
        (LOGPROBS, {"train": {"loss": {"reference": "scorer:helpful", "kl_coef": 0.1}}}),
        (LOGPROBS, {"train": {"algorithm": "distill"}, "objective": {"teacher": "helpful"}}),
        (LOGPROBS, {"train": {"algorithm": "mine:Objective"}}),
    ],
    ids=["reward", "evaluation", "reference", "teacher", "objective of a user"],
)
def test_a_scorer_in_use_is_not_named(scorer: dict[str, Any], sections: dict[str, Any]) -> None:
    assert warned(config(scorer, **sections)) == []


@pytest.mark.parametrize("count", [0, {"helpful": 0}])
def test_a_scorer_without_workers_is_refused(count: object) -> None:
    with pytest.raises(ValidationError, match=r"fleet\.scorers"):
        config(MODEL, fleet={"scorers": count})
