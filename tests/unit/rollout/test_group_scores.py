"""Scores of scorers: no fault of a scorer is one of the group, and no answer is taken unchecked."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest

from paceline.config.schema import Config
from paceline.process import waits
from paceline.prompt_tokenizer import Prompt
from paceline.rpc.auth import TOKEN_VARIABLE
from rollout_worker.engine.base import Completion, Finish
from rollout_worker.generated_group import GeneratedGroup, SharedPath
from rollout_worker.rewards.scoring import Scores
from rollout_worker.tasks.group_scores import GroupScores, ScorerFailed
from scorer_worker.scorer import Item, NoScore, Score, Unavailable
from tests.fakes.scripted_scorer import TOKEN, Answer, ScriptedScorer, lengths, never
from tests.fixtures.configs import config_of

LIMIT_S = 60.0
NAMED = {"exact_match": 1.0, "scorer:helpful": 0.5}


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)


def config(**scorer: object) -> Config:
    known = {"kind": "reward_model", "path": "/rm", "timeout_s": 30.0, **scorer}
    reward = {"functions": {"exact_match": 1.0}}
    if known["kind"] != "logprobs":
        reward["functions"]["scorer:helpful"] = 0.5
    return config_of(reward=reward, scorers={"helpful": known})


def group(*lengths_of: int) -> GeneratedGroup:
    completions = tuple(
        Completion(
            np.arange(n, dtype=np.int32), np.zeros(n, np.float32), ((0, n),), Finish.STOP, None
        )
        for n in lengths_of
    )
    prompt = Prompt(np.array([1, 2], np.int32), "p")
    return GeneratedGroup(prompt, completions, ["x" * n for n in lengths_of], {})


def functions(count: int) -> Scores:
    return Scores([1.0] * count, [{"exact_match": 1.0} for _ in range(count)], 0.0)


@asynccontextmanager
async def scored_by(
    settings: Config, *answers: Answer, directed: int = 9
) -> AsyncIterator[tuple[GroupScores, list[ScriptedScorer]]]:
    """The worker's side, told of the first ``directed`` of the scorers that answer so."""
    async with AsyncExitStack() as stack:
        scorers = [
            await stack.enter_async_context(ScriptedScorer(settings, f"s-{n}", answer))
            for n, answer in enumerate(answers)
        ]
        scores = GroupScores(settings)
        stack.push_async_callback(scores.close)
        scores.directed([scorer.directed for scorer in scorers[:directed]])
        yield scores, scorers


def scored(found: Scores) -> list[float]:
    return [c["scorer:helpful"] for c in found.components]


async def rewards(scores: GroupScores, *lengths_of: int) -> Scores:
    async with asyncio.timeout(LIMIT_S):
        return await scores.rewards(group(*lengths_of), "7", functions(len(lengths_of)), NAMED)


async def test_scores_are_weighted_and_added_in_order() -> None:
    async with scored_by(config(batch_size=2), lengths) as (scores, (scorer,)):
        found = await rewards(scores, 3, 5, 4)
    assert found.rewards == [1 + 1.5, 1 + 2.5, 1 + 2.0]
    assert scored(found) == [3.0, 5.0, 4.0]
    assert sorted(scorer.asked) == [1, 2]


async def test_a_group_waits_while_no_scorer_is_alive_and_says_so() -> None:
    settings = config()
    scores = GroupScores(settings)
    waiting = asyncio.create_task(rewards(scores, 3))
    async with asyncio.timeout(LIMIT_S):
        while not (found := waits.present(0.0)):  # noqa: ASYNC110  (of another task)
            await asyncio.sleep(0)
    assert [(w.kind, w.of) for w in found] == [(waits.WaitKind.SCORER, "helpful")]
    assert found[0].what == "waiting for scorer helpful: none is alive"
    async with ScriptedScorer(settings, "s-0", lengths) as scorer:
        scores.directed([scorer.directed])
        assert scored(await waiting) == [3.0]
    await scores.close()


async def test_a_request_goes_on_with_another_scorer_if_one_leaves_the_directive() -> None:
    """A stopped process answers nothing; its request moves once it is declared dead."""
    async with scored_by(config(), never, lengths, directed=1) as (scores, (stopped, other)):
        waiting = asyncio.create_task(rewards(scores, 3))
        async with asyncio.timeout(LIMIT_S):
            await stopped.was_asked.wait()
        scores.directed([other.directed])
        assert scored(await waiting) == [3.0]


async def test_a_killed_scorer_costs_no_more_than_another_request() -> None:
    settings = config()
    async with ScriptedScorer(settings, "s-1", lengths) as other:
        async with ScriptedScorer(settings, "s-0", never) as killed:
            scores = GroupScores(settings)
            scores.directed([killed.directed])
            waiting = asyncio.create_task(rewards(scores, 3))
            async with asyncio.timeout(LIMIT_S):
                await killed.was_asked.wait()
            scores.directed([killed.directed, other.directed])
        # Its server is gone now; the directive still names it.
        assert scored(await waiting) == [3.0]
        await scores.close()


async def test_a_late_second_reply_changes_nothing() -> None:
    """Both scorers answer one request, and say different things: the group has the first reply
    once."""
    released = asyncio.Event()

    async def late(items: Sequence[Item]) -> list[Score]:
        await released.wait()
        return [99.0 for _ in items]

    async with scored_by(config(timeout_s=0.05), late, lengths) as (scores, (_, other)):
        first = await rewards(scores, 3)
        released.set()
        scores.directed([other.directed])
        second = await rewards(scores, 4)
        assert (scored(first), scored(second)) == ([3.0], [4.0])


async def test_an_unreachable_judge_is_asked_again_and_fails_no_attempt() -> None:
    replies = iter([Unavailable("http://judge does not answer"), None])

    async def at_first_not(items: Sequence[Item]) -> list[Score]:
        if (error := next(replies)) is not None:
            raise error
        return await lengths(items)

    async with scored_by(config(), at_first_not) as (scores, (scorer,)):
        assert scored(await rewards(scores, 3)) == [3.0]
        assert scorer.asked == [1, 1]


def answers(*values: Score) -> Answer:
    async def answer(items: Sequence[Item]) -> list[Score]:
        return list(values)

    return answer


async def no_score(items: Sequence[Item]) -> list[Score]:
    raise NoScore("the reply has no score")


async def bug(items: Sequence[Item]) -> list[Score]:
    raise RuntimeError("CUDA error")


async def nothing(items: Sequence[Item]) -> list[Score]:
    return []


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (answers(1.0), "returned 1 scores for 2 completions"),
        (answers(1.0, float("nan")), "returned the score nan"),
        (answers(1.0, float("inf")), "returned the score inf"),
        (answers(np.zeros(3, np.float32), np.zeros(3, np.float32)), "returned 0 scores for 2"),
        (no_score, "the reply has no score"),
        (bug, "RuntimeError: CUDA error"),
        (nothing, "returned nothing"),
    ],
)
async def test_what_is_no_score_fails_the_attempt_with_the_reason(answer: Answer, why: str) -> None:
    async with scored_by(config(), answer) as (scores, _):
        with pytest.raises(ScorerFailed, match=why) as failed:
            await rewards(scores, 3, 3)
        assert failed.value.reason == "scorer_error"
        assert "helpful" in str(failed.value)


async def test_another_scorer_is_asked_if_one_breaks_down_and_no_third_if_two_do() -> None:
    async with scored_by(config(), bug, lengths) as (scores, (broken, other)):
        assert scored(await rewards(scores, 3)) == [3.0]
        assert (broken.asked, other.asked) == ([1], [1])
    async with scored_by(config(), bug, bug, lengths) as (scores, (*_, third)):
        with pytest.raises(ScorerFailed, match="CUDA error"):
            await rewards(scores, 3)
        assert third.asked == []


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (answers(np.zeros(3, np.float32)), "returned 3 numbers for 4 tokens"),
        (answers(np.full(4, np.nan, np.float32)), "not finite"),
        (answers(1.0), "returned 0 columns for 1 completions"),
    ],
)
async def test_columns_are_checked_against_the_tokens(answer: Answer, why: str) -> None:
    async with scored_by(config(kind="logprobs"), answer) as (scores, _):
        with pytest.raises(ScorerFailed, match=why):
            async with asyncio.timeout(LIMIT_S):
                await scores.columns(group(4), None)


async def test_a_branch_is_scored_after_the_tokens_that_it_shares() -> None:
    """A reward is that of the sequence with the newest turn. A path of its own has a first token
    that nothing predicts."""
    shared = [SharedPath(0, np.array(ids, np.int32), "p") for ids in ([1, 2, 0], [])]
    turns = [[(0, 2), (2, 4), (1, 3)]]
    made = replace(group(3, 4, 5), branches=[None, *shared], turn_ends=turns)
    asked: list[tuple[list[int], int]] = []

    async def ones(items: Sequence[Item]) -> list[Score]:
        asked.extend((item.prompt_tokens.tolist(), len(item.tokens)) for item in items)
        return [np.ones(len(item.tokens), np.float32) for item in items]

    async with asyncio.timeout(LIMIT_S), scored_by(config(kind="logprobs"), ones) as (scores, _):
        (columns,) = (await scores.columns(made, None)).values()
    assert sorted(asked) == [([0], 4), ([1, 2], 3), ([1, 2, 0], 4)]
    found = [np.frombuffer(column, "<f4").tolist() for column in columns]
    assert found == [[1.0] * 3, [1.0] * 4, [0.0, *[1.0] * 4]]
    async with asyncio.timeout(LIMIT_S), scored_by(config(), lengths) as (scores, _):
        assert scored(await scores.rewards(made, "7", functions(1), NAMED)) == [4.0]


async def test_a_caller_without_the_token_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told so in `why`, and waits: the scorer is not at fault, nor is the task."""
    settings = config()
    monkeypatch.setenv(TOKEN_VARIABLE, "another-token-of-many-characters")
    async with scored_by(settings, lengths) as (scores, (scorer,)):
        waiting = asyncio.create_task(rewards(scores, 3))
        async with asyncio.timeout(LIMIT_S):
            while not any("token" in w.what for w in waits.present(0.0)):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert scorer.asked == []
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
