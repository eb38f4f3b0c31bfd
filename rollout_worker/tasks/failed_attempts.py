"""Records of rewards and environments that fail, for who mends them: the traceback in the log, and
what it failed on in a file of the run directory."""

import json
import logging
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.process.structured_log import event
from paceline.v1 import rollout_pb2
from rollout_worker.rewards.score import AttemptFailed

logger = logging.getLogger(__name__)

MOST_FILES = 64  # Of one worker; a reward that always fails must not fill the disk
MOST_TRACES = 32
DIRECTORY = "failed-rewards"


@dataclass
class FailedAttempts:
    run_dir: Path | None = None  # None: nothing is kept
    worker_id: str = ""
    _kept: int = 0
    _logged: set[str] = field(default_factory=set)
    """Reasons whose traceback stands in the log already."""

    def keep(self, lease: rollout_pb2.Lease, failed: AttemptFailed) -> str:
        """The detail of the failure: the error, the completion, and where both are kept."""
        detail = str(failed)
        if failed.trace and detail not in self._logged and len(self._logged) < MOST_TRACES:
            self._logged.add(detail)
            task = {"task": lease.task.task_id, "attempt": lease.task.attempt}
            event(logger, "code of the run failed", logging.ERROR, **task, why=detail)
            logger.error("%s", failed.trace)
        completions = failed.job.each["completion"] if failed.job else []
        if failed.number is not None and failed.number < len(completions):
            detail += f", on completion {failed.number}: {completions[failed.number]!r:.200}"
        path = self._write(lease, failed)
        return f"{detail} (kept in {path})" if path else detail

    def _write(self, lease: rollout_pb2.Lease, failed: AttemptFailed) -> Path | None:
        if self.run_dir is None or self._kept >= MOST_FILES:
            return None
        task = re.sub(r"[^\w.-]", "_", f"{lease.task.task_id}-{lease.task.attempt}")
        path = self.run_dir / DIRECTORY / f"{task}-{self.worker_id}.json"
        kept: dict[str, Any] = {
            "reason": failed.reason,
            "error": str(failed),
            "traceback": failed.trace,
            "completion": failed.number,
            "row_index": lease.index,
            "evaluation_set": lease.eval_set,
            "row": json.loads(lease.row_json) if failed.job is None else None,
            "job": asdict(failed.job) if failed.job else None,
        }
        # It is for people: a full disk fails no more than this file.
        try:
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(kept, indent=1, default=str))
        except (OSError, ValueError) as error:
            event(logger, "failed attempt not kept", logging.WARNING, why=error)
            return None
        self._kept += 1
        return path
