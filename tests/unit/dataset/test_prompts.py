"""A row becomes plain text or chat messages by the configuration alone."""

import copy

import pytest

from paceline.config.sections.training import DataConfig
from paceline.dataset.rows import DataError, load_rows, prompt_of
from paceline.dataset.training_rows import check_rows


def data(**settings) -> DataConfig:
    return DataConfig(path="rows.jsonl", **settings)


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


CHAT = [said("user", "a"), said("assistant", "b"), said("user", "c")]
OWN = [said("system", "own"), said("user", "hi")]
FIELDS = {"question": "2+2", "hints": ["a", 1], "level": 3}


@pytest.mark.parametrize(
    ("row", "settings", "prompt"),
    [
        ({"prompt": "s21="}, {}, "s21="),
        ({"question": "s21="}, {"prompt_field": "question"}, "s21="),
        ({"prompt": "hi"}, {"prompt_suffix": "!"}, "hi!"),
        ({"prompt": "hi"}, {"chat": True}, [said("user", "hi")]),
        ({"prompt": CHAT}, {"system_prompt": "Short."}, [said("system", "Short."), *CHAT]),
        ({"prompt": OWN}, {"system_prompt": "Short."}, OWN),
        ({"prompt": CHAT}, {"prompt_suffix": "!"}, [*CHAT[:2], said("user", "c!")]),
        (FIELDS, {"prompt_template": "{{{level}}} {question}? {hints}"}, '{3} 2+2? ["a", 1]'),
        (
            FIELDS,
            {"prompt_template": "Q: {question}", "chat": True, "prompt_suffix": " /no"},
            [said("user", "Q: 2+2 /no")],
        ),
    ],
)
def test_a_prompt_is_made_of_a_row_which_stays_as_it_is(row, settings, prompt):
    before = copy.deepcopy(row)
    assert prompt_of(row, data(**settings)) == prompt
    assert row == before


@pytest.mark.parametrize(
    ("row", "settings", "message"),
    [
        ({"question": "x"}, {}, "no field 'prompt'; its fields: question"),
        ({"prompt": ""}, {}, "is empty"),
        ({"prompt": None}, {}, "neither text nor a list"),
        ({"prompt": []}, {}, "neither text nor a list"),
        ({"prompt": [{"role": "user"}]}, {}, "needs role and content"),
        ({"prompt": "x"}, {"system_prompt": "y"}, "set data.chat = true"),
    ],
)
def test_unusable_prompts_are_refused(row, settings, message):
    with pytest.raises(DataError, match=message):
        prompt_of(row, data(**settings))


def test_a_prompt_that_no_row_can_give_is_refused_at_the_start(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "hi", "answer": "x"}\n')
    rows = load_rows(path)
    check_rows(rows, data())
    with pytest.raises(DataError, match=r"rows.jsonl: first row: .*set data.chat = true"):
        check_rows(rows, data(system_prompt="Be brief."))
