"""Present waits of a process: for what and whom it waits, since when, and until when at most.

    with waiting(WaitKind.COLLECTIVE, "inside the all-reduce of epoch 9"):
        mesh.wait(handle)

Any thread or task may mark a wait. The worker's reports carry the longest ones, so the controller
can say who waits for whom. A mark costs about a microsecond; equal waits are reported once, with
their number.
"""

import itertools
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from paceline.v1 import worker_pb2

MOST = 8  # waits in a report
LEAST_AGE_S = 1.0  # shorter waits are not reported: a run at full speed has only these
MOST_TEXT = 256


class WaitKind(StrEnum):
    """Kind of thing that is waited for. The members are those of ``WaitKind`` in worker.proto."""

    HUB = "hub"  # a model hub
    MODEL = "model"  # files of a model
    CONTROLLER = "controller"  # an answer of the controllers
    MESH = "mesh"  # a directive that names a mesh
    PEERS = "peers"  # the other members of an epoch, to form it
    COLLECTIVE = "collective"  # the other members of an epoch, inside a collective
    STATE = "state"  # the training state, from or to a member
    CHECKPOINT = "checkpoint"  # reading or writing a checkpoint
    GROUPS = "groups"  # enough ready groups for a step
    PAYLOADS = "payloads"  # payloads of the groups of a step
    VOTES = "votes"  # the other members' votes
    TASKS = "tasks"  # tasks to lease
    WEIGHTS = "weights"  # a version of the weights, from or to another worker
    ENGINE = "engine"  # completions of the engine
    REWARD = "reward"  # reward functions
    ENVIRONMENT = "environment"  # an environment
    VERDICT = "verdict"  # the controller's verdict on finished groups
    DATASET = "dataset"  # the data set
    STORE = "store"  # the journal or the payload store
    SCORER = "scorer"  # a scorer; of: its name in the config
    RANK = "rank"  # another rank of its replica, which the kernel does not run; of: its process id


@dataclass(frozen=True, slots=True)
class Wait:
    kind: WaitKind
    what: str  # for users, after "stopped" or "waits": "inside the all-reduce of epoch 9"
    of: str = ""  # the thing or worker that is waited for; empty if the kind says it
    age_s: float = 0.0
    limit_s: float = 0.0
    """Time after which the process gives up by itself, from the beginning of the wait; 0: none."""
    count: int = 1  # equal waits; the fields are those of the oldest

    @property
    def left_s(self) -> float | None:
        """Until it is given up; None: there is no such limit."""
        return max(0.0, self.limit_s - self.age_s) if self.limit_s else None


@dataclass(slots=True)
class _Mark:
    kind: WaitKind
    what: str
    of: str
    limit_s: float
    since: float = field(default_factory=time.monotonic)


_marks: dict[int, _Mark] = {}
_numbers = itertools.count()


@contextmanager
def waiting(
    kind: WaitKind, what: str, of: str = "", *, limit_s: float = 0.0, since: float | None = None
) -> Iterator[None]:
    """Marks the body as a wait of this process. ``since``: monotonic time at which it began;
    default: now."""
    number = next(_numbers)
    _marks[number] = _Mark(kind, what, of, limit_s, time.monotonic() if since is None else since)
    try:
        yield
    finally:
        del _marks[number]


def loading_model(path: str) -> AbstractContextManager[None]:
    """Marks the loading of ``path``: files of this machine, or a hub that may not answer."""
    if Path(path).expanduser().exists():
        return waiting(WaitKind.MODEL, f"loading the model {path}", path)
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    return waiting(WaitKind.HUB, f"loading the model {path} from {hub}", hub)


def present(least_s: float = LEAST_AGE_S) -> list[Wait]:
    """The waits of this process that are at least so old, the oldest first; equal ones once. Any
    thread."""
    now = time.monotonic()
    found: dict[tuple[WaitKind, str, str], Wait] = {}
    # Copying the values is atomic under the interpreter lock.
    for mark in sorted(_marks.values(), key=lambda mark: mark.since):
        age_s = now - mark.since
        if age_s < least_s:
            break
        key = (mark.kind, mark.what, mark.of)
        if (oldest := found.get(key)) is None:
            if len(found) < MOST:
                found[key] = Wait(mark.kind, mark.what, mark.of, age_s, mark.limit_s)
        else:
            found[key] = Wait(*key, oldest.age_s, oldest.limit_s, oldest.count + 1)
    return list(found.values())


def messages(waits: list[Wait]) -> list[worker_pb2.Wait]:
    return [
        worker_pb2.Wait(
            kind=worker_pb2.WaitKind.Value(f"WAIT_KIND_{wait.kind.name}"),
            what=wait.what[:MOST_TEXT],
            of=wait.of[:MOST_TEXT],
            age_s=wait.age_s,
            limit_s=wait.limit_s,
            count=wait.count,
        )
        for wait in waits
    ]


def from_message(message: worker_pb2.Wait, older_s: float = 0.0) -> Wait | None:
    """The wait that a report names, ``older_s`` seconds later; None for a kind that is not known
    here."""
    try:
        kind = WaitKind[worker_pb2.WaitKind.Name(message.kind).removeprefix("WAIT_KIND_")]
    except (ValueError, KeyError):
        return None
    age_s, count = message.age_s + older_s, max(1, message.count)
    return Wait(kind, message.what, message.of, age_s, message.limit_s, count)
