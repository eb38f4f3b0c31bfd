"""Settings of ``paceline eval``: its options over those of the run that the model comes from."""

from paceline.config.schema import Config
from paceline.config.sections.inputs import DataConfig
from paceline_launcher.cli.eval_command import SET, Wanted, settings
from tests.fixtures.configs import config_of


def prompts_of(config: Config) -> DataConfig:
    return config.evaluation.sets[SET].data(config.data)


def test_prompts_are_made_as_in_the_run() -> None:
    base = config_of(data={"prompt_template": "{q}="})
    assert prompts_of(settings(Wanted(data="held_out"), base, "m")).prompt_template == "{q}="


def test_an_engine_loads_the_model_itself_and_no_adapters_beside_it() -> None:
    run = config_of(model={"lora": {"rank": 2}}, rollout={"engine": "vllm"})
    found = settings(Wanted(data="d"), run, "merged")
    assert found.rollout.vllm == {"load_format": "auto"} and found.model.lora is None


def test_what_eval_fills_itself_can_be_set() -> None:
    given = ["rollout.max_tokens=7", "data.eval_split=held", "model.trust_remote_code=true"]
    given += ["fleet.rollout_threads=3"]
    found = settings(Wanted(data="held_out", overrides=given), config_of(), "m")
    assert found.fleet.rollout_threads == 3
    assert found.rollout.max_tokens == 7 and found.model.trust_remote_code
    assert found.evaluation.sets[SET].split == "held"
