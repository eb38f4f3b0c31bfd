"""Relays without the user's hand: where weights go through host memory in any case, and nowhere
else."""

from typing import Any

import pytest

from paceline.config.schema import AUTO_FANOUT, Config


def config(**rollout: Any) -> Config:
    sections = {"run": {"name": "r"}, "model": {"path": "/m"}, "data": {"path": "rows"}}
    return Config.model_validate({**sections, "rollout": rollout})


@pytest.mark.parametrize(
    ("rollout", "fanout", "through_host"),
    [
        ({}, 0, False),
        ({"engine": "vllm"}, AUTO_FANOUT, True),
        ({"engine": "vllm", "relay_fanout": 0}, 0, True),
        ({"engine": "vllm", "relay_fanout": 1}, 1, True),
        ({"engine": "package.module:Engine"}, 0, False),
        ({"relay_fanout": 1}, 1, True),
    ],
)
def test_the_fanout_of_the_setting(
    rollout: dict[str, Any], fanout: int, through_host: bool
) -> None:
    made = config(**rollout)
    assert (made.relay_fanout, made.weights_through_host) == (fanout, through_host)


@pytest.mark.parametrize("bad", [-1, 65, "some", 1.5])
def test_other_values_are_refused(bad: object) -> None:
    with pytest.raises(ValueError, match="relay_fanout"):
        config(relay_fanout=bad)
