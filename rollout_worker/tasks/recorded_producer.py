"""Producer of recorded groups: from a lease to the tokens of its row, or to a return with the
reason.

row ──► tokens of prompt and completions ──► group
    unusable row: DROP
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from paceline.prompt_tokenizer import BadPrompt
from paceline.recorded.encoding import RecordedRow, RowEncoder
from paceline.recorded.group import recorded_group
from paceline.v1 import rollout_pb2
from rollout_worker.engine.no_engine import NoEngine
from rollout_worker.failures import AttemptFailed
from rollout_worker.held_tasks import HeldTask, HeldTasks
from rollout_worker.leases import returned, row_of
from rollout_worker.tasks.partial_rollouts import PartialRollouts


@dataclass
class RecordedProducer:
    encoder: RowEncoder
    engine: NoEngine
    partials: PartialRollouts = field(default_factory=lambda: PartialRollouts(HeldTasks()))
    """None: a row is encoded at once."""
    _one: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Tokenizers are not made for several threads."""

    @property
    def scoring_capacity(self) -> int:
        return 0  # nothing is scored

    async def produce(self, held: HeldTask) -> rollout_pb2.Group | rollout_pb2.ReturnedTask:
        task = held.lease.task
        try:
            async with self._one:
                # In a thread: a long row takes some time, and the session must go on.
                row = await asyncio.to_thread(self._encode, held.lease)
        except (AttemptFailed, BadPrompt) as failed:
            # No other attempt can do better.
            return returned(task, failed.reason, str(failed), rollout_pb2.RETURN_KIND_DROP)
        self.engine.row_encoded()
        group = recorded_group(task, held.lease.kind, row)
        group.generate_s = time.monotonic() - held.since
        return group

    def _encode(self, lease: rollout_pb2.Lease) -> RecordedRow:
        return self.encoder.encode(row_of(lease))
