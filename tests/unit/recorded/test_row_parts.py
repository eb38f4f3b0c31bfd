"""Rows in every form, and what is said of those that cannot be trained."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from paceline.config.schema import Config
from paceline.config.sections.inputs import DataConfig
from paceline.dataset.rows import DataError, load_rows, prompt_of
from paceline.dataset.training_rows import check_rows, parts_of
from tests.fixtures.configs import config_of
from tests.fixtures.golden import Golden

GOLDEN = Golden("rows")
PAIR = {"chosen_field": "chosen", "rejected_field": "rejected"}


def data(**fields: Any) -> DataConfig:
    return DataConfig.model_validate({"path": "d", **fields})


def config(algorithm: str, **fields: Any) -> Config:
    source = {"source": "recorded"}
    return config_of(data=fields, train={"algorithm": algorithm}, rollout=source)


def told(settings: dict[str, Any], row: dict[str, Any]) -> str:
    """The prompt, and in recorded rows the completions with their rewards; or the refusal."""
    chosen = data(**settings)
    try:
        if chosen.row_form is None:
            return f"prompt: {json.dumps(prompt_of(row, chosen))}"
        parts = parts_of(row, chosen)
    except DataError as error:
        return f"refused: {error}"
    trained = zip(parts.rewards, parts.completions, strict=True)
    lines = [f"reward {reward}: {json.dumps(content)}" for reward, content in trained]
    return "\n".join([f"prompt: {json.dumps(parts.prompt)}", *lines])


@pytest.mark.parametrize("case", GOLDEN.cases)
def test_a_row_in_any_form_is_understood_or_refused_and_stays_as_it_is(case: str) -> None:
    settings, row = map(json.loads, case.splitlines())
    before = copy.deepcopy(row)
    GOLDEN.check(case, told(settings, row))
    assert row == before


def test_a_template_makes_the_prompt_of_a_recorded_completion(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"sum": "2+2", "answer": "4"}\n')
    rows = load_rows(str(tmp_path / "rows.jsonl"))
    made = data(prompt_template="{sum}=", completion_field="answer")
    check_rows(rows, made)
    with pytest.raises(DataError, match=r"no field 'total'.*data.prompt_template takes"):
        check_rows(rows, data(prompt_template="{total}=", completion_field="answer"))


def test_a_data_set_is_refused_if_a_row_lacks_a_field_or_the_first_is_unusable(
    tmp_path: Path,
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"chosen": "b", "prompt": "a", "rejected": "c"}\n{"chosen": "b", "prompt": "a"}\n'
    )
    with pytest.raises(DataError, match=r"no field 'rejected'.*Set data\.rejected_field"):
        check_rows(load_rows(path), data(**PAIR))
    path.write_text('{"chosen": "b", "prompt": "a", "rejected": "b"}\n')
    with pytest.raises(DataError, match="first row: chosen and rejected are equal"):
        check_rows(load_rows(path), data(**PAIR))


def test_the_group_size_follows_from_the_rows_and_survives_a_round_trip() -> None:
    assert config("sft", messages_field="messages").rollout.group_size == 1
    pairs = config("examples.own_objective.leave_one_out:LeaveOneOut", **PAIR)
    assert pairs.rollout.group_size == 2
    assert Config.model_validate(pairs.model_dump(mode="json")) == pairs
