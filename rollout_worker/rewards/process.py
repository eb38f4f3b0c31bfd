"""The worker's end of one scoring process."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from paceline.user_code.child import BadMessage
from paceline.user_code.process import UserProcess
from rollout_worker.rewards.functions import Job, RewardError, ScoringFailed, Values

SPARE_CALLS = 4


class ProcessLost(ScoringFailed):
    """The process ended with this job in it. ``guilty``: True if the job's own call was running,
    False if another job's was, None if unknown. ``hung``: the process was killed because a call
    took too long."""

    def __init__(self, detail: str, *, guilty: bool | None, hung: bool = False) -> None:
        super().__init__("reward_timeout" if hung else "reward_crashed", detail)
        self.guilty = guilty


class ScoringProcess(UserProcess):
    module = "rollout_worker.rewards.child"
    name = "scoring process"
    what = "reward functions"
    writer = "a reward function"
    refusal = RewardError

    def __init__(
        self,
        functions: Sequence[str] | Mapping[str, float],
        timeout_s: float,
        freed: Callable[[Any], None],
    ) -> None:
        super().__init__(freed)
        self.functions, self.timeout_s = functions, timeout_s
        self.components: list[tuple[str, float]] = []
        """Name and weight of each function's component."""
        self.waits = False  # All functions are coroutine functions: many jobs at once make sense
        self._longest_s = 0.0
        """Time in which any job in the process is answered, if each call keeps its limit."""

    def first(self) -> dict[str, Any]:
        return {"functions": self.functions, "timeout_s": self.timeout_s}

    async def start(self) -> dict[str, Any]:
        hello = await super().start()
        self.components = [(name, weight) for name, weight in hello["ready"]]
        self.waits = hello["waits"]
        self._tasks.append(asyncio.create_task(self._watch()))
        return hello

    async def run(self, job: Job) -> tuple[Values, float]:
        """Values for each completion, and seconds spent on them. Raises ScoringFailed."""
        if self.lost:
            raise ProcessLost("the scoring process has ended", guilty=False)
        # Of the newest job: a change of the setting holds for what is under way as well.
        self.timeout_s = job.timeout_s or self.timeout_s
        _, future = self.call({"job": asdict(job)})
        # Calls that it may take, one after another, behind those of another job.
        calls = 2 * len(job) * len(self.components) + SPARE_CALLS
        self._longest_s = max(self._longest_s, self.timeout_s * calls)
        answer = await future
        if "scores" in answer:
            return answer["scores"], answer["seconds"]
        place = answer.get("number")
        raise ScoringFailed(
            answer["reason"],
            answer["detail"],
            trace=str(answer.get("trace") or ""),
            number=place if isinstance(place, int) else None,
        )

    def answers(self, message: dict[str, Any]) -> bool:
        whole = (
            isinstance(message.get("scores"), list) and isinstance(message.get("seconds"), float)
            if "scores" in message
            else isinstance(message.get("reason"), str) and isinstance(message.get("detail"), str)
        )
        if not whole:
            raise BadMessage("no answer to a job")
        return True

    def loss(self, number: int, running: int, detail: str) -> ProcessLost:
        known = self.jobs == 1 or running in self._calls
        guilty = (self.jobs == 1 or number == running) if known else None
        return ProcessLost(detail, guilty=guilty, hung=bool(self._hung))

    async def _watch(self) -> None:
        """Kills the process if a call hangs: then its event loop sends no heartbeat."""
        while True:
            await asyncio.sleep(min(0.25, self.timeout_s / 4))
            silent_s, _ = self.beat()
            silent = ""
            if silent_s > self.timeout_s:
                silent = f"a call took longer than {self.timeout_s:g} s"
            elif time.monotonic() - self._answered_t > self._longest_s:
                # It lives: whatever a reward did to the process, an answer will not come.
                silent = f"no scores came for {self._longest_s:g} s"
            if self.jobs and not self.lost and silent:
                await self.kill(silent)
                return
