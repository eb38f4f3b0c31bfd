"""A reward may be wrong, slow or deadly: the attempt fails with a reason, everything else goes
on."""

import asyncio
import contextlib
import os
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.config.sections.inputs import RewardConfig
from paceline.user_code import process as user_process
from paceline.user_code.child import BadMessage, read_message
from rollout_worker.rewards import process as process_module
from rollout_worker.rewards.functions import Job, ScoringFailed, load
from rollout_worker.rewards.process import ScoringProcess
from rollout_worker.rewards.scoring import Scorer, Scores
from testbed.fleets.controllers import until
from testbed.patience import patient

TIMEOUT_S = 1.5
REWARDS = """
    import asyncio, ctypes, os, signal, subprocess, sys, time

    class FunctionTimedOut(BaseException):
        pass

    class Unspeakable(Exception):
        def __str__(self):
            raise FunctionTimedOut

    class Odd:
        def __float__(self):
            raise FunctionTimedOut

        def __repr__(self):
            sys.exit(1)

    def length(prompt, completion, answer, row, **context):
        print("a reward may print")
        return len(completion) + row.get("bonus", 0)

    def by_word(completion):
        if completion == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if completion == "exit":
            os._exit(3)
        if completion == "hang":
            time.sleep(60)
        if completion == "hold":
            # Holds the interpreter: no thread of the process can do anything.
            ctypes.PyDLL(None).sleep(60)
        if completion == "raise":
            raise ValueError("no such word\\nsecond line")
        if completion == "nan":
            return float("nan")
        if completion == "none":
            return None
        if completion == "huge":
            return 1e200
        if completion == "cancel":
            raise asyncio.CancelledError
        if completion == "leave":
            sys.exit(1)
        if completion == "timed out":
            raise FunctionTimedOut("1.5 s")
        if completion == "interrupt":
            raise KeyboardInterrupt
        if completion == "unspeakable":
            raise Unspeakable
        if completion == "odd":
            return Odd()
        if completion == "fork":
            os.fork()
            return 1.0
        if completion == "close":
            os.closerange(0, 4096)
        if completion == "reopen":
            os.closerange(3, 4096)
            # Whatever is written to the old numbers goes into these files now.
            for _ in range(32):
                os.open("reopened", os.O_RDWR | os.O_CREAT)
        if completion == "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        if completion == "freeze the guard":
            os.kill(os.getppid(), signal.SIGSTOP)
            time.sleep(60)
        if completion == "alarm":
            signal.setitimer(signal.ITIMER_REAL, 0.001)
            time.sleep(0.1)
        if completion.startswith("child"):
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", completion])
            time.sleep(60)
        if completion.startswith("apart"):
            sleep = [sys.executable, "-c", "import time; time.sleep(60)", completion]
            # Twice forked, and in a session of its own: a daemon, whose parent has ended.
            if os.fork() == 0:
                os.setsid()
                subprocess.Popen(sleep, start_new_session=True)
                os._exit(0)
            time.sleep(60)
        if completion == "print":
            for _ in range(20):
                print("much" * 250_000)
        if completion.startswith("write"):
            # Every descriptor that it can find.
            for fd in range(3, 64):
                try:
                    os.write(fd, completion[5:].encode() * 9)
                except OSError:
                    pass
            time.sleep(0.1)
        return 1.0

    def meet(count):
        met = asyncio.Barrier(count)

        async def reward(completion):
            # 1.0 once ``count`` completions are scored at the same time
            if completion == "hang":
                await asyncio.sleep(60)
            await met.wait()
            return 1.0

        return reward

    three_meet, sixty_meet = meet(3), meet(60)

    async def waits(completion, answer):
        await asyncio.sleep(60 if completion == "hang" else 0.2)
        if completion == "crash":
            os._exit(4)
        return float(completion == answer)

    def ranks(completions, finish_reasons):
        assert len(finish_reasons) == len(completions)
        return [sorted(completions).index(c) for c in completions]

    def short(completions):
        return [1.0]

    def broken(completions):
        def values():
            yield 1.0
            if completions[0] == "exit":
                sys.exit(1)
            while completions[0] == "endless":
                yield 1.0

        return {0: 1.0, 1: 0.0} if completions[0] == "by number" else values()

    async def threads(completion):
        if completion == "hang":
            await asyncio.to_thread(time.sleep, 60)
        return await asyncio.to_thread(lambda: 1.0)

    async def raises(completion):
        await asyncio.sleep(0)
        if completion == "spawn":
            asyncio.ensure_future(raises("timed out"))
            await asyncio.sleep(0.05)
        if completion == "timed out":
            raise FunctionTimedOut
        if completion == "leave":
            sys.exit(0)
        if completion == "cancel":
            raise asyncio.CancelledError
        return 1.0

    def context(task_id, completion, token_count):
        return token_count + len(task_id)

    not_callable = 3
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of rewards beside the run, named anew for each test."""
    name = f"rewards_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(REWARDS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    root = str(Path(__file__).parents[3])
    monkeypatch.setenv("PYTHONPATH", f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return name


@pytest.fixture
async def make(module: str) -> AsyncIterator[Any]:
    made: list[Scorer] = []

    async def start(functions: Any, processes: int = 1) -> Scorer:
        if isinstance(functions, str):
            functions = [f"{module}:{functions}"]
        scorer = Scorer(RewardConfig(functions=functions, processes=processes, timeout_s=TIMEOUT_S))
        made.append(scorer)
        await scorer.start()
        return scorer

    yield start
    for scorer in made:
        await scorer.close()


def job(*completions: str, answer: Any = "12", row: dict[str, Any] | None = None) -> Job:
    n = len(completions)
    return Job(
        shared={
            "prompt": "s21=",
            "answer": answer,
            "row": row or {},
            "task_id": "t7",
            "attempt": 1,
            "evaluation": False,
        },
        each={
            "completion": list(completions),
            "finish_reason": ["stop"] * n,
            "token_count": [3] * n,
        },
    )


def scoring_processes() -> list[psutil.Process]:
    """Those of this process that live: what another test left as a zombie has no command line."""
    found = []
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if "rewards.child" in " ".join(process.cmdline()):
                found.append(process)
    return found


async def reason(scorer: Scorer, *completions: str) -> str:
    with pytest.raises(ScoringFailed) as failed:
        await scorer.score(job(*completions))
    assert "\n" not in str(failed.value)
    return failed.value.reason


async def test_text_without_a_line_end_is_refused_at_once() -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(b"text")
    with pytest.raises(BadMessage):
        await asyncio.wait_for(read_message(reader), patient(5))


@pytest.mark.parametrize("processes", [0, 1])
async def test_weighted_sum_and_components(make: Any, module: str, processes: int) -> None:
    functions = {"exact_match": 2.0, f"{module}:length": 0.5, "format:^\\d+$": -1.0}
    scorer = await make(functions, processes)
    scores = await scorer.score(job("12", " 12\n", "ab", row={"bonus": 10}))
    assert [list(c.values()) for c in scores.components] == [[1, 12, 1], [1, 14, 0], [0, 12, 0]]
    assert list(scores.components[0]) == ["exact_match", f"{module}:length", "format"]
    assert scores.rewards == [2 + 6 - 1, 2 + 7, 6]
    assert scores.seconds >= 0


@pytest.mark.parametrize("processes", [0, 1])
async def test_batch_async_and_context_forms(make: Any, module: str, processes: int) -> None:
    functions = [f"{module}:{f}" for f in ("ranks", "three_meet", "context")]
    scores = await (await make(functions, processes)).score(job("b", "12", "c"))
    assert [list(c.values()) for c in scores.components] == [[1, 1, 5], [0, 1, 5], [2, 1, 5]]


@pytest.mark.parametrize("processes", [0, 1])
async def test_a_failed_reward_is_never_a_zero(make: Any, processes: int) -> None:
    scorer = await make("by_word", processes)
    for word in (
        *("raise", "nan", "none", "huge", "cancel", "leave"),
        *("timed out", "interrupt", "unspeakable", "odd"),
    ):
        assert await reason(scorer, "fine", word) == "reward_error", word
        assert (await scorer.score(job("fine"))).rewards == [1.0]


@pytest.mark.parametrize("word", ["fork", "close", "reopen", "freeze", "alarm"])
async def test_whatever_a_reward_does_to_its_process_others_are_scored(
    make: Any, word: str
) -> None:
    scorer = await make("by_word")
    async with asyncio.timeout(60):
        fates = await asyncio.gather(
            scorer.score(job("fine", word)), scorer.score(job("fine")), return_exceptions=True
        )
        if word == "fork":
            assert isinstance(fates[0], Scores) and fates[0].rewards == [1.0, 1.0]
        else:
            assert isinstance(fates[0], ScoringFailed)
        assert isinstance(fates[1], Scores)
        assert (await scorer.score(job("fine"))).rewards == [1.0]


async def test_a_reward_that_stops_the_guard_of_its_process_is_ended_with_it(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_process, "KILL_S", 0.5)
    scorer = await make("by_word")
    async with asyncio.timeout(60):
        assert await reason(scorer, "freeze the guard") == "reward_timeout"
        assert (await scorer.score(job("fine"))).rewards == [1.0]


@pytest.mark.parametrize("processes", [0, 1])
async def test_threads_that_never_return_leave_threads_for_others(
    make: Any, processes: int
) -> None:
    scorer = await make("threads", processes)
    hanging = [reason(scorer, *["hang"] * 8) for _ in range(8)]
    async with asyncio.timeout(60):
        assert set(await asyncio.gather(*hanging)) == {"reward_timeout"}
        assert (await scorer.score(job("fine"))).rewards == [1.0]
        assert await asyncio.to_thread(lambda: 1) == 1, "nor does the worker itself wait"


@pytest.mark.parametrize(
    ("function", "word"),
    [*(("broken", word) for word in ("exit", "endless", "by number")), ("short", "two")],
)
async def test_a_batch_of_the_wrong_length_or_of_none_fails(
    make: Any, function: str, word: str
) -> None:
    scorer = await make(function)
    async with asyncio.timeout(60):
        failed = await reason(scorer, word, "b")
        assert failed in ("reward_error", "reward_timeout", "reward_crashed")


async def test_an_answer_that_does_not_come_from_a_living_process_is_not_waited_for(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "SPARE_CALLS", -1.8)
    scorer = await make("waits")
    async with asyncio.timeout(60):
        with pytest.raises(ScoringFailed, match=r"no scores came for 0\.3 s"):
            await scorer.score(job("hang"))


@pytest.mark.parametrize("processes", [0, 1])
async def test_a_waiting_reward_that_raises_what_is_no_exception_fails(
    make: Any, processes: int
) -> None:
    """func_timeout's FunctionTimedOut is a BaseException: its group was once held for ever, as with
    a cancellation that nobody asked for."""
    scorer = await make("raises", processes)
    async with asyncio.timeout(60):
        for word in ("timed out", "leave", "cancel"):
            assert await reason(scorer, "fine", word) == "reward_error", word
        assert (await scorer.score(job("spawn", "fine"))).rewards == [1.0, 1.0]


@pytest.mark.parametrize(
    ("word", "failed"),
    [
        *(("crash", "reward_crashed"), ("exit", "reward_crashed")),
        *(("hang", "reward_timeout"), ("hold", "reward_timeout")),
    ],
)
async def test_a_reward_that_kills_its_process_or_hangs_fails_alone(
    make: Any, word: str, failed: str
) -> None:
    scorer = await make("by_word")
    async with asyncio.timeout(50):  # the reward itself ends after 60 s
        fates = await asyncio.gather(
            reason(scorer, "fine", word), *(scorer.score(job("fine", "fine")) for _ in range(2))
        )
    assert fates[0] == failed
    assert [fate.rewards for fate in fates[1:]] == [[1.0, 1.0]] * 2


async def test_the_time_limit_is_per_call_not_per_group(make: Any, module: str) -> None:
    scorer = await make(["exact_match", f"{module}:waits"])
    assert (await scorer.score(job(*["x"] * 5))).rewards == [0.0] * 5


async def test_a_waiting_reward_that_takes_too_long_fails_alone(make: Any) -> None:
    """Groups of waiting rewards are scored side by side: these wait for one another."""
    scorer = await make("sixty_meet")
    fates = await asyncio.gather(
        reason(scorer, "hang"), *(scorer.score(job("12", "x")) for _ in range(30))
    )
    assert fates[0] == "reward_timeout"
    assert all(fate.rewards == [1.0, 1.0] for fate in fates[1:])


def pool_process(scorer: Scorer) -> ScoringProcess:
    """The pool's only process."""
    (process,) = scorer._pool.processes
    return process


async def test_nobody_is_blamed_for_a_crash_that_cannot_be_attributed(make: Any) -> None:
    scorer = await make("waits")
    fates = await asyncio.gather(
        reason(scorer, "crash"), *(scorer.score(job("12")) for _ in range(3))
    )
    assert fates[0] == "reward_crashed"
    assert all(fate.rewards == [1.0] for fate in fates[1:])


async def test_a_hang_of_a_dropped_job_is_not_blamed_on_the_next_one(make: Any) -> None:
    scorer = await make("by_word")
    dropped = asyncio.create_task(scorer.score(job("hang")))
    await until(lambda: pool_process(scorer).jobs == 1)
    dropped.cancel()
    assert (await scorer.score(job("fine"))).rewards == [1.0]


async def test_room_that_dropped_jobs_took_is_given_back(make: Any, module: str) -> None:
    scorer = await make([f"{module}:waits", f"{module}:by_word"])
    dropped = [asyncio.create_task(scorer.score(job("12"))) for _ in range(5)]
    await until(lambda: pool_process(scorer).jobs == 2)
    for task in dropped:
        task.cancel()
    async with asyncio.timeout(60):
        assert (await scorer.score(job("fine"))).rewards == [1.0]


async def test_a_scoring_process_that_dies_idle_is_replaced(make: Any) -> None:
    scorer = await make("by_word")
    (process,) = scoring_processes()
    lost = pool_process(scorer)
    process.kill()
    # No job is there to notice.
    await until(lambda: pool_process(scorer) is not lost)
    async with asyncio.timeout(60):
        assert (await scorer.score(job("fine"))).rewards == [1.0]


@pytest.mark.parametrize("kind", ["child", "apart"])
async def test_what_a_hanging_reward_started_is_killed_with_it(
    make: Any, tmp_path: Path, kind: str
) -> None:
    """Also a daemon in a session of its own."""
    mark = f"{kind}-{tmp_path.name}"
    scorer = await make("by_word")
    assert await reason(scorer, mark) == "reward_timeout"
    await until(lambda: _processes(mark) == [])


@pytest.mark.parametrize("written", ["garbage!", "\0\0\0\0", "\n", "{}\n", "null\n"])
async def test_a_reward_that_writes_into_every_descriptor_fails_alone(
    make: Any, written: str
) -> None:
    scorer = await make("by_word")
    async with asyncio.timeout(60):
        assert await reason(scorer, f"write{written}") == "reward_crashed"
        assert (await scorer.score(job("fine"))).rewards == [1.0]


async def test_what_a_reward_prints_is_bounded_in_the_log(
    make: Any, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    scorer = await make("by_word")
    async with asyncio.timeout(60):
        assert (await scorer.score(job("print"))).rewards == [1.0]
    await scorer.close()
    said = capfd.readouterr().err
    assert said.startswith("much") and len(said) < 2 * user_process.OUTPUT_BYTES
    assert len([r for r in caplog.records if "output left out" in r.message]) == 1


WORKER = """
import asyncio, sys
from paceline.config.sections.inputs import RewardConfig
from rollout_worker.rewards.functions import Job
from rollout_worker.rewards.scoring import Scorer

async def main():
    scorer = Scorer(RewardConfig(functions=[sys.argv[1]], processes=1, timeout_s=60.0))
    await scorer.start()
    await scorer.score(Job({}, {"completion": [sys.argv[2]]}))

asyncio.run(main())
"""


async def test_what_a_reward_started_ends_with_a_worker_that_is_killed(
    module: str, tmp_path: Path
) -> None:
    """The kernel ends the scoring process with its worker, and nothing of what that has started."""
    mark = f"child-{tmp_path.name}"
    command = [sys.executable, "-c", WORKER, f"{module}:by_word", mark]
    worker = await asyncio.create_subprocess_exec(*command)
    await until(
        lambda: len(_processes(mark)) == 2, 120.0
    )  # the worker, and what the reward started
    worker.kill()
    await worker.wait()
    await until(lambda: _processes(mark) == [])


async def test_close_leaves_no_process(make: Any) -> None:
    scorer = await make("by_word", 2)
    before = scoring_processes()
    assert len(before) == 2
    await scorer.close()
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in before)


@pytest.mark.parametrize(
    ("completion", "answer", "value"),
    [
        (r"2 times 3 is 6, so $\boxed{\frac{1}{2}}$", r"\frac12", 1),
        (r"the answer is \boxed{7}, not 6", "7", 1),
        (r"the answer is 7", "7", 0),  # in no box
        (r"\boxed{7} or \boxed{8}", "7", 0),
        (r"\boxed{x = 7}", "7", 1),
        (r"\boxed{\text{Monday}}", "Monday", 1),
        (r"\boxed{Monday}", r"\text{Tuesday}", 0),
        (r"\boxed{\{2, 1\}}", r"1, 2", 1),
        (r"\boxed{7}", r"So it is \boxed{7}.", 1),  # a whole solution as the answer
        (r"\boxed{}", "7", 0),
        (r"\boxed{(-\infty, 3)}", "x<3", 1),
        (r"\boxed{x \le 3}", r"(-\infty,3)", 0),
    ],
)
def test_math_boxed_judges_the_box_and_nothing_else(
    completion: str, answer: str, value: int
) -> None:
    for reward in load(["math_boxed", "math_boxed:intervals"]):
        assert reward.call(prompt="", completion=completion, answer=answer) == value


@pytest.mark.parametrize("box", ["9^{9^{9^{9}}}", "1+" * 3000 + "1", "(" * 3000])
def test_a_box_that_nobody_could_evaluate_is_wrong_and_no_failed_attempt(box: str) -> None:
    (reward,) = load(["math_boxed:intervals"])
    assert reward.call(prompt="", completion=rf"\boxed{{{box}}}", answer="7") == 0


@pytest.mark.parametrize(
    ("inequality", "interval"),
    [("x<3", r"(-\infty,3)"), (r"2 \le x < 5", "[2,5)"), (r"t \geq \frac{1}{2}", r"[0.5,\infty)")],
)
def test_an_inequality_counts_as_its_interval_where_the_task_allows_it(
    inequality: str, interval: str
) -> None:
    strict, intervals = load(["math_boxed", "math_boxed:intervals"])
    call = {"prompt": "", "completion": rf"\boxed{{{inequality}}}", "answer": interval}
    assert (strict.call(**call), intervals.call(**call)) == (0, 1)


def test_exact_match_takes_any_of_several_answers() -> None:
    (reward,) = load(["exact_match"])
    assert reward.call(prompt="", completion="b ", answer=["a", "b"]) == 1
    assert reward.call(prompt="", completion="7", answer=7) == 1
    assert reward.call(prompt="", completion="c", answer=["a", "b"]) == 0


def test_scoring_processes_import_no_torch() -> None:
    import subprocess

    code = "import rollout_worker.rewards.child, sys; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


def _processes(mark: str) -> list[int]:
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if mark in (process.info["cmdline"] or []) and process.info["status"] != "zombie":
            found.append(process.pid)
    return found
