"""Settings of ``paceline eval``: its options over those of the run that the model comes from."""

from paceline.config.schema import Config
from paceline.config.sections.training import DataConfig
from paceline_launcher.cli.eval_command import SET, Wanted, settings
from tests.fixtures.configs import config_of


def prompts_of(config: Config) -> DataConfig:
    return config.evaluation.sets[SET].data(config.data)


def test_prompts_are_made_as_in_the_run() -> None:
    base = config_of(data={"prompt_template": "{q}="})
    assert prompts_of(settings(Wanted(data="held_out"), base, "m")).prompt_template == "{q}="
