"""Settings of the run in force when a controller begins to lead with an edited config."""

from types import SimpleNamespace
from typing import Any

import pytest

from controller.context import RunSettings
from controller.ledger.enums import Phase
from paceline.config.load import ConfigError, changeable
from paceline.config.schema import Config
from tests.fixtures.configs import config_of
from tests.fixtures.ledgers import Driven


def config(max_tokens: int, steps: int = 10) -> Config:
    return config_of(
        train={"loss": {"aggregation": "dr_grpo"}, "steps": steps},
        rollout={"max_tokens": max_tokens},
    )


def leader_with(file: Config, phase: Phase) -> RunSettings:
    """Of a run of 512 tokens and 10 steps."""
    run = Driven(steps=10)
    state = run.state
    state.phase = phase
    state.versions.step = 10
    state.settings.values = state.settings.configured = changeable(config(512))
    context: Any = SimpleNamespace(config=file, run_spec=lambda rows, in_force: in_force.train)
    return RunSettings(context, lambda: state)


@pytest.mark.parametrize(
    ("phase", "steps"), [(Phase.OPEN, 10), (Phase.SUSPENDED, 10), (Phase.FINISHED, 20)]
)
def test_another_divisor_of_the_loss_is_refused_as_long_as_steps_follow(
    phase: Phase, steps: int
) -> None:
    rows: Any = None
    with pytest.raises(ConfigError, match=r"rollout.max_tokens = 256: .* the run has 512"):
        leader_with(config(256, steps), phase).start_command(rows)
    same = leader_with(config(512, steps), phase).start_command(rows)
    assert same.args[1]["rollout.max_tokens"] == 512


@pytest.mark.parametrize("phase", [Phase.FINISHED, Phase.FAILED])
def test_a_run_that_has_ended_is_led_with_any_divisor(phase: Phase) -> None:
    rows: Any = None
    command = leader_with(config(256), phase).start_command(rows)
    assert command.args[1]["rollout.max_tokens"] == 256
