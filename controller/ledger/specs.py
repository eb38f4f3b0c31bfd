"""Values that commands, events and state share: the run's spec, leases, groups, statistics."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from operator import add
from typing import Any

from controller.ledger.codec import TRANSIENT
from controller.ledger.enums import Kind, Role
from paceline.dataset.data_order import DataOrder, DataSource
from paceline.ids import ANY, MeshEpoch, Step, TaskId, Version


@dataclass(frozen=True, slots=True)
class LearningRate:
    peak: float = 1e-6
    schedule: str = "constant"  # constant, linear or cosine
    warmup_steps: int = 0
    min_ratio: float = 0.0

    def at(self, step: Step, steps: int) -> float:
        """Learning rate of ``step``, counted from 1, in a run of ``steps``. Warm-up is linear, from
        peak / warmup_steps at step 1 to the peak at step warmup_steps. The decay would reach
        min_ratio * peak at the step after the last one, as in transformers'
        get_linear_schedule_with_warmup: the last batch is trained, too."""
        if step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if self.schedule == "constant":
            return self.peak
        span = steps - self.warmup_steps
        done = min(1.0, (step - 1 - self.warmup_steps) / span) if span > 0 else 1.0
        shape = 1.0 - done if self.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.peak * (self.min_ratio + (1.0 - self.min_ratio) * shape)


LATE_TRAIN, LATE_DROP = "train", "drop"
HELD_OUT = "held_out"  # Set that a run has by ``eval_rows`` alone


@dataclass(frozen=True, slots=True)
class EvalSet:
    compact = True

    name: str
    rows: int
    samples: int = 1  # Completions of each prompt
    every: int = 0  # Steps between evaluations; 0: RunSpec.eval_every
    solved_at: float = 1.0  # Reward from which a completion counts as solved


@dataclass(frozen=True, slots=True)
class SetResult:
    name: str
    count: int
    left_out: int
    metrics: Mapping[str, float]
    """Means over ``count`` rows; see SetScores. Empty if they are at most half of the set."""
    failed: int = 0  # Rows that were given up without a score


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSpec:
    """The fields of a run's spec that follow from settings which a run may change, and mean what
    the settings of these names mean. A new live setting is a field here, a line in
    ``ControllerContext.run_spec``, and ``Live`` at the setting in the config."""

    steps: int
    max_staleness: int
    late_groups: str = LATE_DROP  # Or LATE_TRAIN
    max_token_age: int = 0
    eval_rows: int
    eval_every: int
    early_stop_evals: int = 0
    eval_drop: float = 0.0
    checkpoint_every: int
    lr: LearningRate = field(default_factory=LearningRate)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec(LiveSpec):
    """The part of the config and the data that the ledger's rules depend on. What is not in
    ``LiveSpec`` is fixed for the run."""

    run_id: str
    run_name: str
    seed: int
    groups_per_step: int
    group_size: int
    max_attempts: int
    dataset_rows: int
    filter_uninformative: bool
    shuffle: bool
    desired: Mapping[str, int]
    """Desired workers by role. A later leader may bring other counts and bounds."""
    data_digest: str = ""
    config_digest: str = ""
    bounds: Mapping[str, int] = field(default_factory=dict)
    """Limits of the desired counts: policy_min, policy_max, rollout_min, rollout_max; an absent one
    is no limit. POOL_planned: workers of it that have room at devices of pairs. rollout_spares:
    workers beside the desired ones, to stand by. training_seats: seats that train at first, if
    seats are lent."""
    max_nonfinite_steps: int = 0
    recorded: bool = False
    """Completions are in the data: no worker loads weights, and no group is too old."""
    eval_sets: tuple[EvalSet, ...] = ()  # Beside the one of ``eval_rows``
    relay_fanout: int = 0  # 0: the replicas send to all
    stores_weights: bool = False  # Workers read them from a store, to which one replica writes
    best_metric: str = ""  # SET/METRIC that ranks evaluations. Empty: the reward of the first set.
    sources: tuple[DataSource, ...] = ()  # None: all rows are of one source without a name

    @property
    def evaluations(self) -> tuple[EvalSet, ...]:
        held_out = (EvalSet(HELD_OUT, self.eval_rows),) if self.eval_rows else ()
        return (*held_out, *self.eval_sets)

    @property
    def judging(self) -> tuple[str, str]:
        """(set, metric) that ranks evaluations."""
        first = next((each.name for each in self.evaluations), HELD_OUT)
        name, _, metric = (self.best_metric or f"{first}/reward").partition("/")
        return name, metric

    def samples_of(self, eval_set: str) -> int:
        """Completions of each of its prompts."""
        return next((each.samples for each in self.eval_sets if each.name == eval_set), 1)

    @property
    def live(self) -> LiveSpec:
        return LiveSpec(**values(LiveSpec, self))

    @property
    def order(self) -> DataOrder:
        return DataOrder(self.seed, self.dataset_rows, self.shuffle, self.sources)

    @property
    def trains_late(self) -> bool:
        """True if a group is trained that has tokens older than ``max_staleness``. Never in a
        synchronous run of samples: its steps are made of tokens of the state before them."""
        return self.recorded or (self.late_groups == LATE_TRAIN and self.max_staleness > 0)

    @property
    def token_age(self) -> int:
        """Steps after which a token has no weight in the loss."""
        if self.recorded:
            return ANY  # recorded tokens have no age
        return self.max_token_age if self.trains_late else self.max_staleness


@dataclass(frozen=True, slots=True)
class LeasedTask:
    compact = True

    task_id: TaskId
    attempt: int
    kind: Kind
    dataset_pass: int
    index: int
    seed: int
    eval_set: str = ""  # Evaluation: the set whose row it is. Empty: HELD_OUT.


@dataclass(frozen=True, slots=True)
class GroupMeta:
    """The ledger's knowledge of a group; the payload stays in the payload store."""

    task_id: TaskId
    attempt: int
    sequences: int  # Of all samples
    prompt_tokens: int
    tokens: int  # Trainable completion tokens over all sequences
    min_version: Version
    max_version: Version
    reward_mean: float
    reward_std: float  # Of a sample: sqrt(sum (r - mean)^2 / (n - 1)); 0 for one
    reward_max: float  # Over the group's samples
    generate_s: float = 0.0
    reward_s: float = 0.0
    token_versions: tuple[tuple[Version, int], ...] = ()
    """Number of trainable tokens by version, oldest first. It is as long as the group's generation
    in steps."""
    lengths: tuple[int, ...] = ()
    """Completion tokens of each sequence, those that are not trained included."""
    sequence_versions: tuple[tuple[tuple[Version, ...], int], ...] = ()
    """Number of sequences by the versions of their trainable tokens. Sequences without such a token
    are in none. Those of a sample count as one, unless train.loss.branches = "each"."""
    rewards: tuple[float, ...] = field(default=(), metadata=TRANSIENT)
    """Rewards of an evaluation's samples; empty for training groups."""
    answers: tuple[str, ...] = field(default=(), metadata=TRANSIENT)
    """Answers that the samples vote for; "": no vote."""
    truncated: int = field(default=0, metadata=TRANSIENT)
    """Evaluation: samples with a sequence that ended at the limit of tokens."""
    prompt_cut: int = 0  # Tokens that the row's prompt has lost because it was too long
    digest: str = ""  # Digest of the payload; empty if there is none
    branches: tuple[int, ...] = ()  # Sequences of each sample; empty: one each
    prefixes: tuple[int, ...] = ()
    """Tokens of each sequence's path before its own; empty: those of the prompt."""

    @property
    def samples(self) -> int:
        return len(self.branches) or self.sequences

    @property
    def prefix_tokens(self) -> int:
        """Tokens before the sequences' own, those that are shared counted for each."""
        return sum(self.prefixes) or self.prompt_tokens * self.sequences

    @property
    def whole_lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence, with what it goes on from."""
        prefixes = self.prefixes or (self.prompt_tokens,) * len(self.lengths)
        return tuple(map(add, prefixes, self.lengths))


@dataclass(frozen=True, slots=True)
class StatValue:
    compact = True

    sum: float
    weight: float
    max: float


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    worker_id: str
    incarnation: int
    role: Role
    host: str
    pid: int
    tensor_host: str
    ranks: int = 1
    state_version: Version = Version(-1)  # Policy: version of the state it holds; -1 for none
    scorer: str = ""  # Scorer: its name in the config
    address: str = ""  # Scorer: host:port at which it answers rollout workers
    cgroup: str = ""  # Control group of its memory; empty: it knows none
    memory_kills: int = -1
    """Processes that the kernel had killed in that group by then; -1: not known."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """By setting: digest of the user's code or the model that it took from its disk."""
    seat: str = ""  # Devices that it holds in turn with a worker of the other role; "": its own


@dataclass(frozen=True, slots=True)
class Member:
    worker_id: str
    incarnation: int
    tensor_host: str
    needs_state: bool

    @property
    def who(self) -> tuple[str, int]:
        """(worker id, incarnation) of its process."""
        return self.worker_id, self.incarnation


@dataclass(frozen=True, slots=True)
class StepSettings:
    """Settings of a step: every attempt at it has the same."""

    compact = True

    lr: float
    token_age: int  # Steps after which its tokens are masked


@dataclass(frozen=True, slots=True)
class StepSpec:
    """One attempt at a step: its batch, and the part of each replica."""

    step: Step
    version: Version  # Version of the state before it
    mesh_epoch: MeshEpoch
    groups: tuple[TaskId, ...]  # The batch, in the order in which the groups were chosen
    shards: Mapping[str, tuple[int, ...]]  # Worker id to positions in ``groups``
    replay: bool
    """The composition of an earlier attempt at the step, but for groups that had to leave."""
    settings: StepSettings


@dataclass(frozen=True, slots=True)
class MeshSpec:
    epoch: MeshEpoch
    members: tuple[Member, ...]  # In rank order
    state_version: Version  # Every member must hold this state before it takes part in a step
    step: Step
    source_rank: int  # Member that sends the state to those without it; -1: each restores by itself
    restore: bool
    """No member holds the state: each loads ``checkpoint_path`` ("": the initial model)."""
    checkpoint_path: str

    @property
    def names(self) -> list[str]:
        """Worker ids in rank order."""
        return [member.worker_id for member in self.members]

    def rank(self, worker_id: str, incarnation: int) -> int:
        """-1 for a worker that is no member."""
        members = (member.who for member in self.members)
        return next((r for r, who in enumerate(members) if who == (worker_id, incarnation)), -1)


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """A weights link; replaces the receiver's earlier one."""

    generation: int
    publisher: str
    publisher_incarnation: int
    receiver: str
    receiver_incarnation: int
    reload: bool = False
    """The newest version is sent again: what the receiver has of it was withdrawn."""
    tree: int = 0  # Number of the tree of links that it belongs to; 0 if there are no relays
    blames: str = ""  # Relay from which the receiver's link before broke


def values(kind: type, source: Any) -> dict[str, Any]:
    """The fields of the dataclass ``kind`` in ``source``, which has them too."""
    return {f.name: getattr(source, f.name) for f in fields(kind)}
