"""Several sources: their rows, weights and fields, and errors that name the source."""

import json
from pathlib import Path

import pytest

from controller.context import ControllerContext
from controller.dataset_rows import DatasetRows
from controller.ledger.enums import Kind
from paceline.config.load import load_config, to_toml
from paceline.config.schema import Config, length_in_words, run_steps
from paceline.config.sections.inputs import DataConfig
from paceline.dataset.row_source import DataError
from paceline.dataset.training_rows import open_training_rows
from paceline.errors import BadInput, plural
from tests.fixtures.configs import config_of
from tests.unit.dataset.test_rows_of_leases import Leased


def write(path: Path, count: int, **fields: str) -> str:
    lines = [
        json.dumps({name: f"{text}{n}" for name, text in fields.items()}) for n in range(count)
    ]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, dict]:
    return {
        "math": {"path": write(tmp_path / "m.jsonl", 3, prompt="m", answer="1"), "weight": 3},
        "code": {
            "path": write(tmp_path / "c.jsonl", 5, task="c", solution="2"),
            "weight": 1,
            "prompt_field": "task",
            "answer_field": "solution",
        },
    }


def test_rows_of_all_sources_have_the_same_names_for_their_fields(sources: dict) -> None:
    rows, found = open_training_rows(DataConfig(sources=sources))
    assert [(s.name, s.rows, s.share) for s in found] == [
        ("code", 5, 250),
        ("math", 3, 750),
    ]
    assert len(rows) == 8
    first_of_code, first_of_math = rows[0], rows[5]
    assert first_of_code == {"task": "c0", "solution": "20", "prompt": "c0", "answer": "20"}
    assert first_of_math == {"prompt": "m0", "answer": "10"}


async def test_a_lease_gets_the_row_of_its_source(sources: dict, tmp_path: Path) -> None:
    config = Config.model_validate({"model": {"path": "/"}, "data": {"sources": sources}})
    rows = await DatasetRows.load(config)
    (text,) = await rows.of([Leased(Kind.TRAIN, 6)])
    assert json.loads(text)["prompt"] == "m1" and rows.train_rows == 8


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"data.sources.code: .*c.jsonl:1: no field 'prompt'"),
        (
            {"prompt_template": "{prompt} {level}"},
            r"data.sources.code: .*no field 'level'.*data.prompt_template",
        ),
        ({"answer_field": None}, r"data.answer_field is none: set it"),
    ],
)
def test_a_source_that_lacks_a_field_is_named(sources: dict, settings: dict, message: str) -> None:
    if not settings:
        del sources["code"]["prompt_field"]
    with pytest.raises(DataError, match=message):
        open_training_rows(DataConfig(sources=sources, **settings))


def test_sources_survive_the_toml_of_the_run_directory(tmp_path: Path, sources: dict) -> None:
    data = {
        "sources": sources,
        "prompt_suffix": " =",
        "chat_template_args": {"enable_thinking": False},
    }
    math = {"path": "math.jsonl", "samples": 8, "reward": ["math_verify"]}
    more = {"train": {"epochs": 2}, "evaluation": {"sets": {"math": math}}}
    config = Config.model_validate({"model": {"path": "/m"}, "data": data, **more})
    (tmp_path / "run.toml").write_text(to_toml(config))
    assert load_config(tmp_path / "run.toml") == config


@pytest.mark.parametrize(
    ("train", "rows", "steps"),
    [
        ({}, 10, 100),
        ({"epochs": 1, "groups_per_step": 8}, 33, 5),
        ({"epochs": 0.1, "groups_per_step": 1}, 30, 3),
        ({"epochs": 0.01, "groups_per_step": 8}, 33, 1),
        ({"max_samples": 1000, "groups_per_step": 8}, 5, 15),
        ({"steps": "none", "epochs": 2, "groups_per_step": 4}, 10, 5),
    ],
)
def test_the_steps_follow_from_epochs_and_samples(train: dict, rows: int, steps: int) -> None:
    config = config_of(train=train, rollout={"group_size": 8})
    assert run_steps(config, rows) == steps
    assert length_in_words(config, rows).startswith(f"{plural(steps, 'step')} of ")


def test_a_warm_up_longer_than_the_epochs_is_refused() -> None:
    train = {"epochs": 1, "groups_per_step": 8, "optimizer": {"warmup_steps": 5}}
    config = config_of(train=train)
    with pytest.raises(
        BadInput, match="warmup_steps = 5 is larger than the run, which has 4 steps"
    ):
        run_steps(config, 32)


def test_the_controller_tells_the_ledger_the_derived_steps_sources_and_limits(
    sources: dict,
) -> None:
    train = {"epochs": 3, "groups_per_step": 8}
    data = {"sources": sources}
    scorers = {"rm": {"kind": "reward_model", "path": "m"}}
    fleet = {"sharing": "turns", "rollout": 1, "scorers": 2}
    parts = {"data": data, "train": train, "scorers": scorers, "fleet": fleet}
    config = Config.model_validate({"model": {"path": "/"}, **parts})
    train_rows, found = open_training_rows(config.data)
    rows = DatasetRows(train_rows, None, sources=found)
    context = object.__new__(ControllerContext)
    context.run_digest = "d"
    spec = context.run_spec(rows, config)
    assert (spec.steps, spec.sources) == (3, found)
    assert spec.bounds["scorer:rm_planned"] == 2
