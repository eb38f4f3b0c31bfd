"""Scoring process of the pool: jobs in, scores out. See paceline.user_code.child."""

import asyncio
import sys
import time
from typing import Any

from paceline.errors import one_line
from paceline.user_code.child import Child
from rollout_worker.rewards.functions import Job, Reward, RewardError, ScoringFailed, load, score


class _Scoring(Child):
    rewards: list[Reward]

    async def serve(self, message: dict[str, Any]) -> None:
        started = time.monotonic()
        answer: dict[str, Any] = {"id": message["id"]}

        def calling(entered: bool) -> None:
            self.mark(message["id"] if entered else 0)

        try:
            job = Job(**message["job"])
            limit = job.timeout_s or self.given["timeout_s"]
            answer["scores"] = await score(self.rewards, job, timeout_s=limit, calling=calling)
        except ScoringFailed as failure:
            answer |= {"reason": failure.reason, "detail": str(failure)}
            answer |= {"trace": failure.trace, "number": failure.number}
        except BaseException as error:
            # A cancellation of the user's, or a value that breaks the check of it: the worker waits
            # for an answer to this job in any case.
            detail = f"the job cannot be scored: {one_line(error)}"
            answer |= {"reason": "reward_error", "detail": detail}
        answer["seconds"] = time.monotonic() - started
        calling(False)
        self.send(answer)


def main() -> int:
    child = _Scoring()
    try:
        child.rewards = load(child.given["functions"])
    except RewardError as error:
        child.send({"error": str(error)})
        return 2
    weights = [[reward.component, reward.weight] for reward in child.rewards]
    hello = {"ready": weights, "waits": all(reward.waits for reward in child.rewards)}
    asyncio.run(child.run(hello))
    return 0


if __name__ == "__main__":
    sys.exit(main())
