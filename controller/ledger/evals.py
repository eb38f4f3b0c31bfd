"""Evaluation rounds: the held-out prompts, once greedily, with the weights of a step or newer.

A round's tasks ``e<step>.<row>`` are leased like training tasks and before them; their scores are
summed here and their payloads are not kept.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Any

from controller.ledger.events import EvalRecorded, EvalScheduled


@dataclass(slots=True)
class EvalRound:
    step: int
    rows: int
    pending: list[int] = field(default_factory=list)
    """Heap of rows that wait for a lease."""
    open: int = 0
    """Rows not yet scored or dropped."""
    reward_sum: float = 0.0
    count: int = 0


@dataclass(slots=True)
class Evals:
    rounds: dict[int, EvalRound] = field(default_factory=dict)
    """Under way, by step."""
    done: dict[int, int] = field(default_factory=dict)
    """Rows of every finished round, by step."""

    def scheduled(self, step: int) -> bool:
        return step in self.rounds or step in self.done

    def knows(self, step: int, row: int) -> bool:
        """Whether ``e<step>.<row>`` was ever a task."""
        rows = self.rounds[step].rows if step in self.rounds else self.done.get(step, 0)
        return 0 <= row < rows

    def apply_scheduled(self, event: EvalScheduled) -> None:
        rows = list(range(event.rows))
        self.rounds[event.step] = EvalRound(event.step, event.rows, rows, event.rows)

    def lease(self, step: int, row: int) -> None:
        pending = self.rounds[step].pending
        if pending[0] == row:
            heapq.heappop(pending)
        else:  # a lower one is suspect and goes out of turn
            pending.remove(row)
            heapq.heapify(pending)

    def release(self, step: int, row: int) -> None:
        heapq.heappush(self.rounds[step].pending, row)

    def score(self, step: int, reward: float) -> None:
        round_ = self.rounds[step]
        round_.open -= 1
        round_.reward_sum += reward
        round_.count += 1

    def drop(self, step: int, row: int) -> None:
        round_ = self.rounds[step]
        round_.open -= 1
        if row in round_.pending:
            round_.pending.remove(row)
            heapq.heapify(round_.pending)

    def apply_recorded(self, event: EvalRecorded) -> None:
        self.done[event.step] = self.rounds.pop(event.step).rows

    def dump(self) -> dict[str, Any]:
        return {
            "rounds": [
                [r.step, r.rows, sorted(r.pending), r.open, r.reward_sum, r.count]
                for r in self.rounds.values()
            ],
            "done": [[step, rows] for step, rows in self.done.items()],
        }

    @classmethod
    def load(cls, data: dict[str, Any]) -> Evals:
        rounds = [EvalRound(*r) for r in data["rounds"]]
        return cls(rounds={r.step: r for r in rounds}, done=dict(data["done"]))
