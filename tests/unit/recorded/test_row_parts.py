"""Recorded rows in every form, and what is said of those that cannot be trained."""

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from paceline.config.schema import Config
from paceline.config.sections.training import DataConfig
from paceline.dataset.rows import DataError, load_rows
from paceline.dataset.training_rows import check_rows, parts_of
from tests.fixtures.configs import config_of

USER = {"role": "user", "content": "2+2"}
FOUR = {"role": "assistant", "content": "4"}
FIVE = {"role": "assistant", "content": "5"}
PAIR = {"chosen_field": "chosen", "rejected_field": "rejected"}


def data(**fields: Any) -> DataConfig:
    return DataConfig.model_validate({"path": "d", **fields})


def config(algorithm: str = "sft", rollout: dict[str, Any] | None = None, **fields: Any) -> Config:
    recorded = {"source": "recorded", **(rollout or {})}
    return config_of(data=fields, train={"algorithm": algorithm}, rollout=recorded)


def refusal(*arguments: Any, **fields: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        config(*arguments, **fields)
    return str(caught.value)


def test_a_chat_is_cut_before_its_first_and_after_its_last_answer() -> None:
    row = {"messages": [USER, FOUR, USER, FIVE, USER]}
    parts = parts_of(row, data(messages_field="messages", system_prompt="Count."))
    assert parts.prompt == [{"role": "system", "content": "Count."}, USER]
    assert parts.completions == ([FOUR, USER, FIVE],)


def test_a_template_makes_the_prompt_of_a_recorded_completion(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"sum": "2+2", "answer": "4"}\n')
    rows = load_rows(str(tmp_path / "rows.jsonl"))
    made = data(prompt_template="{sum}=", completion_field="answer")
    check_rows(rows, made)
    assert parts_of(rows[0], made).prompt == "2+2="
    with pytest.raises(DataError, match=r"no field 'total'.*data.prompt_template takes"):
        check_rows(rows, data(prompt_template="{total}=", completion_field="answer"))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt_template": "{q}"}, "data.prompt_template has no effect on whole chats"),
        ({"prompt_suffix": "!"}, "data.prompt_suffix has no effect on whole chats"),
        ({"long_prompts": "truncate_left"}, "data.long_prompts truncates .*remove it"),
        ({"curriculum": "success_rate"}, 'data.curriculum .*rollout.source = "recorded"'),
    ],
)
def test_what_changes_no_recorded_row_is_refused(fields: dict[str, Any], words: str) -> None:
    assert re.search(words, refusal(messages_field="messages", **fields))


@pytest.mark.parametrize("fields", [{"prompt_template": "{q}"}, {"prompt_suffix": "!"}])
def test_a_pair_of_whole_chats_takes_no_template(fields: dict[str, str]) -> None:
    row = {"chosen": [USER, FOUR], "rejected": [USER, FIVE]}
    with pytest.raises(DataError, match=f"data.{next(iter(fields))} has no effect"):
        parts_of(row, data(**PAIR, **fields))


def test_a_completion_is_text_after_a_text_and_a_message_after_messages() -> None:
    row = {"prompt": "2+2", "answer": "4"}
    assert parts_of(row, data(completion_field="answer")).completions == ("4",)
    parts = parts_of(row, data(completion_field="answer", chat=True))
    assert (parts.prompt, parts.completions) == ([USER], ([FOUR],))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2+2", "chosen": "4", "rejected": "5"},
        {"prompt": [USER], "chosen": [FOUR], "rejected": [FIVE]},
        {"chosen": [USER, FOUR], "rejected": [USER, FIVE]},
        {"prompt": "the text of it", "chosen": [USER, FOUR], "rejected": [USER, FIVE]},
    ],
)
def test_every_way_to_write_a_pair_gives_chosen_before_rejected(row: dict[str, Any]) -> None:
    parts = parts_of(row, data(**PAIR))
    assert parts.rewards == (1.0, 0.0)
    if isinstance(row["chosen"], str):
        assert (parts.prompt, parts.completions) == ("2+2", ("4", "5"))
    else:
        assert (parts.prompt, parts.completions) == ([USER], ([FOUR], [FIVE]))


def test_a_margin_or_a_label_is_the_reward() -> None:
    pair = {"prompt": "2+2", "chosen": "4", "rejected": "5", "margin": 3}
    assert parts_of(pair, data(**PAIR, margin_field="margin")).rewards == (3.0, 0.0)
    fields = {"completion_field": "completion", "label_field": "label"}
    for label, reward in ((True, 1.0), (False, 0.0), (1, 1.0)):
        row = {"prompt": "2+2", "completion": "4", "label": label}
        assert parts_of(row, data(**fields)).rewards == (reward,)


@pytest.mark.parametrize(
    ("row", "fields", "said"),
    [
        ({"messages": [USER]}, {"messages_field": "messages"}, "no message of the assistant"),
        ({"messages": [FOUR]}, {"messages_field": "messages"}, "begins with the assistant"),
        (
            {"messages": [USER, {"role": "assistant", "content": ""}]},
            {"messages_field": "messages"},
            "message 1, of the assistant, is empty",
        ),
        ({"prompt": "a", "answer": ""}, {"completion_field": "answer"}, "'answer' is empty"),
        ({"prompt": "a"}, {"completion_field": "answer"}, "Set data.completion_field"),
        ({"prompt": "a", "chosen": "b"}, PAIR, "no field 'rejected'"),
        ({"prompt": "a", "chosen": "b", "rejected": None}, PAIR, "field 'rejected' is null"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, PAIR, "are equal"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, PAIR, "'rejected' is empty"),
        ({"chosen": [USER, FOUR], "rejected": [FIVE]}, PAIR, "is a whole chat, and the other"),
        (
            {"chosen": [{"role": "user", "content": "?"}, FOUR], "rejected": [USER, FIVE]},
            PAIR,
            "do not begin with the same messages",
        ),
        ({"chosen": [USER, FOUR], "rejected": [USER]}, PAIR, "does not answer"),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c", "margin": -1},
            {**PAIR, "margin_field": "margin"},
            "a number above 0",
        ),
        (
            {"prompt": "a", "completion": "b", "label": "yes"},
            {"completion_field": "completion", "label_field": "label"},
            "true or false",
        ),
    ],
)
def test_a_row_that_cannot_be_trained_is_named(
    row: dict[str, Any], fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(DataError, match=re.escape(said)):
        parts_of(row, data(**fields))


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
    assert config(messages_field="messages").rollout.group_size == 1
    pairs = config("examples.own_objective.leave_one_out:LeaveOneOut", **PAIR)
    assert pairs.rollout.group_size == 2
    assert Config.model_validate(pairs.model_dump(mode="json")) == pairs


def test_settings_that_contradict_recorded_data_are_refused_with_the_remedy() -> None:
    chat = {"messages_field": "messages"}
    assert "leave rollout.group_size out" in refusal("sft", {"group_size": 8}, **chat)
    assert "rollout.temperature would scale" in refusal("sft", {"temperature": 0.7}, **chat)
    assert "choose another one" in refusal("grpo", **chat)
    assert "data.messages_field" in refusal("sft")
    assert "needs data.rejected_field" in refusal("sft", chosen_field="chosen")
    assert "a row has one form" in refusal("sft", **chat, completion_field="text")
    assert "does not train rows of the form pair" in refusal("sft", **PAIR)
    assert 'unless rollout.source = "recorded"' in refusal("grpo", {"source": "engine"}, **chat)
    assert 'set rollout.source = "recorded"' in refusal("sft", {"source": "engine"})
