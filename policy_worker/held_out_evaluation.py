"""Evaluation of a run of recorded data: one replica measures the held-out examples with the state
before the next step.

    NextPlan: EVALUATE ─► examples (once) ─► groups ─► forward ─► RecordHeldOut ─► NextPlan

Rank 0 of the mesh does it before it computes its groups of the next step, so the state cannot be
lost to a commit. If it dies, the next rank 0 is asked.
"""

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.config.schema import Config
from paceline.dataset.recorded_encoding import RowEncoder
from paceline.process.structured_log import event
from paceline.process.waits import WaitKind, waiting
from paceline.prompt_tokenizer import BadPrompt, PromptTokenizer
from paceline.v1 import common_pb2, policy_pb2, rollout_pb2
from policy_worker.control_plane import BlockingControlPlane, PolicyReport
from policy_worker.objectives.batch import BadGroup
from policy_worker.step.stats import Stats
from policy_worker.trainer import Trainer

log = logging.getLogger(__name__)


_TASK = "e0."
"""Prefix of the names of held-out groups, before the number of the example."""


@dataclass(eq=False)
class HeldOutEvaluation:
    config: Config
    control: BlockingControlPlane
    trainer: Trainer
    report: PolicyReport
    _groups: dict[int, rollout_pb2.Group | None] = field(default_factory=dict)
    """By example, what was encoded for an earlier evaluation; None: it cannot be used."""
    _encoder: RowEncoder | None = None

    def run(self, step: int, over: Callable[[], bool]) -> None:
        """Measures and reports; or returns without, if ``over()`` turned true. Raises
        RequestRefused and what the trainer raises."""
        began = time.monotonic()
        self.report.work(f"evaluation after step {step}")
        if (groups := self._all(over)) is None:
            return
        usable = [group for group in groups if group is not None]
        stats: Stats | None = None
        while usable and stats is None:
            try:
                stats = self.trainer.measure(usable)
            except BadGroup as error:
                # The model or its memory cannot take them.
                named = {task_id for task_id, _ in error.groups}
                level = logging.WARNING if named else logging.ERROR
                event(log, "held-out rows left out", level, step=step, rows=len(named), why=error)
                # Without a name none can be told from the others.
                usable = [g for g in usable if named and g.task.task_id not in named]
                examples = (int(task_id.removeprefix(_TASK)) for task_id in named)
                self._groups |= dict.fromkeys(examples, None)
        request = policy_pb2.HeldOutMeasured(
            caller=self.control.caller,
            step=step,
            version=self.trainer.state.version,
            rows=len(usable),
            left_out=len(groups) - len(usable),
            stats=stats.messages() if stats is not None else {},
        )
        with waiting(WaitKind.CONTROLLER, f"reporting the evaluation after step {step}"):
            self.control.call("PolicyService.RecordHeldOut", request, over)
        loss = stats.mean("loss") if stats is not None else None
        ms = (time.monotonic() - began) * 1e3
        event(log, "evaluated", step=step, rows=len(usable), loss=loss, ms=ms)

    def _all(self, over: Callable[[], bool]) -> list[rollout_pb2.Group | None] | None:
        total = -1
        found: list[rollout_pb2.Group | None] = []
        while total < 0 or len(found) < total:
            request = policy_pb2.HeldOutRequest(caller=self.control.caller, first=len(found))
            with waiting(WaitKind.CONTROLLER, "fetching held-out rows"):
                reply = self.control.call("PolicyService.HeldOutRows", request, over)
            if reply is None:
                return None
            total = reply.total
            if not reply.rows:
                break
            # A list: extend() takes from a generator while the length grows.
            found += [self._group(n, text) for n, text in enumerate(reply.rows, start=len(found))]
            self.trainer.on_progress()
        return found

    def _group(self, number: int, example: str) -> rollout_pb2.Group | None:
        if number in self._groups:
            return self._groups[number]
        if self._encoder is None:
            self._encoder = RowEncoder(self.config, PromptTokenizer(self.config))
        task = common_pb2.TaskRef(task_id=f"{_TASK}{number}", attempt=1)
        group = None
        try:
            group = self._encoder.encode(json.loads(example), task, rollout_pb2.TASK_KIND_EVAL)
        except BadPrompt as error:
            event(log, "held-out row left out", logging.WARNING, row=number, why=error)
        self._groups[number] = group
        return group
