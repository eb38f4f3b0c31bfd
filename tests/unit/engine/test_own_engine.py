"""Engines of the user's own: what is refused before a run starts, and what is made."""

import sys
from pathlib import Path

import pytest

from paceline.config.schema import Config
from paceline.prompt_tokenizer import PromptTokenizer
from rollout_worker.engine.base import EngineError
from rollout_worker.engine.choice import make_engine, own_engine
from testbed.fleets.local_run import write_run
from tests.fixtures.preflight import INPUTS, findings_of
from tests.fixtures.train_states import tiny_config

MODULE = """
from rollout_worker.engine.base import Engine
from rollout_worker.engine.transformers.engine import TransformersEngine

class Whole(TransformersEngine):
    pass

class Half(Engine):
    async def start(self): ...
    async def generate(self, request): ...

class Other:
    pass
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_engines.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "own_engines", raising=False)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("own_engines:Missing", "has no 'Missing'"),
        ("no_such_module:Engine", "cannot import no_such_module"),
        ("own_engines:Other", "is no subclass of rollout_worker.engine.base.Engine"),
        ("own_engines:Half", "lacks abort, close, load_weights, stats, version"),
    ],
)
def test_an_engine_that_cannot_serve_is_refused_with_what_it_lacks(name: str, why: str) -> None:
    with pytest.raises(EngineError, match=why):
        own_engine(name)


def test_the_named_engine_is_made_from_config_and_tokenizer(tmp_path: Path) -> None:
    settings = tiny_config(tmp_path).model_dump()
    settings["rollout"] |= {"engine": "own_engines:Whole"}
    config = Config.model_validate(settings)
    assert type(make_engine(config, PromptTokenizer(config))).__name__ == "Whole"


def test_an_engine_that_cannot_give_its_device_up_takes_no_turns() -> None:
    with pytest.raises(EngineError, match=r"define its park\(\) and unpark\(\)"):
        own_engine("tests.fakes.engine:FakeEngine", turns=True)
    assert own_engine("own_engines:Whole", turns=True)


@pytest.mark.heavy
def test_a_run_with_such_an_engine_is_refused_before_it_starts(tmp_path: Path) -> None:
    from paceline.config.load import load_config

    path = write_run(tmp_path, rollout={"engine": "own_engines:Half"})
    failed = [check for check in findings_of(load_config(path), *INPUTS) if check.state == "fail"]
    assert [("lacks abort" in check.found, bool(check.remedy)) for check in failed] == [
        (True, True)
    ]
