"""Groups in hand: given to a trainer as if a payload store had them."""

from collections.abc import Sequence
from typing import cast

from paceline.payloads.group_payload import encode
from paceline.v1 import rollout_pb2
from policy_worker.objectives.batch import GroupKey
from policy_worker.rows.group_reading import AcceptedGroup
from policy_worker.rows.payload_reader import PayloadReader
from policy_worker.trainer import Trainer


def add(trainer: Trainer, groups: Sequence[rollout_pb2.Group], *, last: bool = False) -> None:
    """Adds their gradients to the open step of a replica of one rank. Raises as take() and add()
    do."""
    payloads = {(g.task.task_id, g.task.attempt): encode(g) for g in groups}
    accepted = [AcceptedGroup(key) for key in payloads]
    trainer.payloads = cast(PayloadReader, _InHand(payloads))
    trainer.add(trainer.take(accepted), last)


class _InHand(dict[GroupKey, bytes]):
    def fetch(self, keys: Sequence[GroupKey], _: object) -> list[bytes]:
        return [self[key] for key in keys]

    def close(self) -> None: ...
