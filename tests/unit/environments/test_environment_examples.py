"""The environments that come with Paceline."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.environments.calculator import LARGEST, BadExpression, answer, calculator, evaluate
from examples.environments.guess_number import guess_number
from examples.environments.two_digits import two_digits
from tests.fixtures.environment_fixture import (
    check_trained_as_sampled,
    lease_of,
    mask_of,
    staged,
    tokens_of,
)

# ---- calculator


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        *(("3 * (4 + 5)", "27"), ("7/2", "3.5"), ("6 / 2", "3"), ("7 // 2", "3"), ("-7 % 5", "3")),
        *(("2 ** 10", "1024"), ("2 ^ 10", "1024"), ("1/3", "0.3333333333")),
        *(("1.5e3 + .5", "1500.5"), ("10**100 - 1", str(10**100 - 1))),
    ],
)
def test_arithmetic(expression: str, result: str) -> None:
    assert answer(f"so <calc>{expression}") == result


@pytest.mark.parametrize(
    "expression",
    [
        *("__import__('os').system('true')", "().__class__", "x", "1 < 2", "True", "'a' * 3"),
        *("3j", "(-8) ** 0.5", "lambda: 1", "1; 2", "1 +"),
        # No small result.
        *("9**9**9**9", "10**10**10", "2**-99999999", "1e308 * 1e308", "1/0", "1 % 0", "0 ** -1"),
        *("(" * 60 + "1" + ")" * 60 + "+" + "-" * 60 + "1", "1+" * 150 + "1"),
    ],
)
def test_all_but_arithmetic_with_a_small_result_is_refused_at_once(expression: str) -> None:
    with pytest.raises(BadExpression):
        evaluate(expression)


@given(st.text(alphabet="0123456789+-*/%^(). eaj_[]<>", max_size=60))
def test_any_text_has_a_finite_result_or_is_refused(text: str) -> None:
    try:
        value = evaluate(text)
    except BadExpression:
        return
    assert abs(value) <= LARGEST


async def test_the_calculator_answers_in_the_middle_of_the_text_until_it_is_not_asked(
    model: Path,
) -> None:
    def speaker(prompt: str) -> str:
        results = re.findall(r"<result>(.*?)</result>", prompt)
        if not results:
            return "3 boxes of 14: <calc>3 * 14</calc> and more that is never said"
        if len(results) == 1:
            return f" and 8 more: <calc>{results[0]} + 8</calc>"
        return results[1]

    async with staged(model, calculator, speaker) as stage:
        group = await stage.group(lease_of({"prompt": "How many?", "answer": "50"}))
        completion = group.completions[0]
        assert completion.text == (
            "3 boxes of 14: <calc>3 * 14</calc><result>42</result>"
            " and 8 more: <calc>42 + 8</calc><result>50</result>50<eos>"
        )
        made = "".join(
            stage.tokenizer.decode_all([token])
            for token, model_made in zip(tokens_of(completion), mask_of(completion), strict=True)
            if model_made
        )
        assert "<result>" not in made and made.endswith("50<eos>")
        assert completion.reward == 1.0, "exact_match of what follows the newest result"


# ---- guessing


def bisect(prompt: str) -> str:
    """Guesses from the transcript alone."""
    low, high = 1, 100
    for guess, hint in re.findall(r"(\d+)(?:<eos>)?\n(?:\[user\])?(higher|lower)", prompt):
        if hint == "higher":
            low = int(guess) + 1
        else:
            high = int(guess) - 1
    return str((low + high) // 2)


@pytest.mark.parametrize("chat", [False, True], ids=["text", "chat"])
async def test_a_model_that_halves_the_range_finds_the_number(model: Path, chat: bool) -> None:
    async with staged(model, guess_number, bisect, data={"chat": chat}) as stage:
        found = []
        for seed in range(6):
            group = await stage.group(lease_of({"prompt": "Guess!"}, seed=seed))
            one, other = group.completions
            assert one.tokens == other.tokens, "the samples of a group look for the same number"
            assert one.reward_components["solved"] == 1.0
            assert one.reward == 1.0 + one.reward_components["speed"]
            found.append(one.text)
        assert len(set(found)) > 1, "different tasks, different numbers"


async def test_an_agent_and_its_sub_agent_find_their_digits_by_tool_and_notes(model: Path) -> None:
    def bisect(prompt: str) -> str:
        notes = re.match(r"(\d) (\d)\?", prompt)
        low, high = map(int, notes.groups()) if notes else (0, 9)
        for guess, hint in re.findall(r"(\d)<eos>\n(higher|lower)", prompt):
            low, high = (int(guess) + 1, high) if hint == "higher" else (low, int(guess) - 1)
        return str((low + high) // 2)

    settings = {"max_turns": 8, "max_branches": 4}
    async with staged(model, two_digits, bisect, **settings) as stage:
        counts = set()
        for seed in range(8):
            stage.engine.requests.clear()
            group = await stage.group(lease_of({"prompt": "?"}, seed=seed))
            check_trained_as_sampled(stage, group)
            rewards = [dict(c.reward_components) for c in group.completions]
            assert min(rewards[0].values()) >= 0.5, "2^4 > 10: both were found"
            assert [bool(parts) for parts in rewards] == [
                not c.HasField("branch") for c in group.completions
            ]
            counts.add(len(group.completions) / 2)
        assert counts >= {3, 4}, "the histories of some were compacted"
