"""Local gradients of one step: the sum over groups, in any order and over any number of calls.

- The contribution of a group depends on the step's totals and on the group alone. So the sum does
  not depend on how groups are assigned to replicas, packed into rows, or split over calls.
- Local gradients live in ``parameter.grad`` and are only ever added to; the mesh gets a copy.
- The ranks of a replica reduce in the backward of every row, so that each holds slices alone.
- A group is added at most once: the plan of the step's next epoch names it again, and it is
  skipped.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from paceline.expert_routes import expert_layers, experts_of, routes_width
from paceline.mesh.elastic_mesh import EpochCancelled
from paceline.process.compute_device import to_device
from paceline.v1 import rollout_pb2
from policy_worker.model.attention import MicroBatch
from policy_worker.model.train_state import TrainState, local_tensor
from policy_worker.objectives.batch import BadGroup, GroupKey, Ints, StepTotals
from policy_worker.objectives.columns import TokenColumns, TokenScores, shares_of_units
from policy_worker.objectives.load import load_objective
from policy_worker.objectives.objective import Loss, Mean, Objective
from policy_worker.rows.group_reading import AcceptedGroup, ModelLimits
from policy_worker.rows.replica import Replica
from policy_worker.rows.row_forwards import RowForwards, balance_of_sequences
from policy_worker.rows.row_shards import Fetch, RowShard, RowShards
from policy_worker.step.stats import Stats, count_rewards, measure


@dataclass(eq=False)
class Gradients:
    """Local gradients of the open step, and the groups that are in them."""

    state: TrainState
    device: torch.device
    frozen: Mapping[str, nn.Module] = field(default_factory=dict)
    """Models that are only asked, by the name of their part."""
    replica: Replica = field(default_factory=Replica)
    on_progress: Callable[[], None] = lambda: None
    left: Callable[[], bool] = lambda: False
    """True if the step was given up; asked after every micro-batch on the rank that leads."""

    def __post_init__(self) -> None:
        self.objective: Objective = load_objective(self.state.config)
        self.parameters = [p for _, p in self.state.named_parameters() if p.requires_grad]
        self._shapes = [local_tensor(p).shape for p in self.parameters]
        self._sizes = [shape.numel() for shape in self._shapes]
        self._elements = sum(self._sizes)
        self.part_slices: dict[str, slice] = {}
        start = 0
        for name, model in self.state.parts.items():
            mine = sum(local_tensor(p).numel() for p in model.parameters() if p.requires_grad)
            self.part_slices[name] = slice(start, start + mine)
            start += mine
        self.size = self._elements + len(self.objective.summed)
        """Elements of this rank's parameters, then the objective's sums."""
        self._sums = torch.zeros(len(self.objective.summed), device=self.device)
        self.forwards = RowForwards(self.objective, self.state, self.frozen)
        copy_of = self.forwards.copies.copy_of
        self.leaves = [copy_of.get(parameter, parameter) for parameter in self.parameters]
        """Tensors whose gradient a backward completes, by parameter."""
        self._shares = RowShards(self.objective, self.state.config, self.replica)
        self._spec: StepTotals | None = None
        self._added: set[GroupKey] = set()
        self.stats = Stats()

    def begin(self, spec: StepTotals, shard: Iterable[GroupKey]) -> list[GroupKey]:
        """Opens or continues a step; returns the groups of ``shard`` that are still to be added.
        Starts over if the step is another one, or if a group was added that is no longer this
        replica's and would be trained twice."""
        wanted = list(shard)
        if spec != self._spec or not self._added.issubset(wanted):
            self.clear()
            self._spec = spec
        return [key for key in wanted if key not in self._added]

    def clear(self) -> None:
        """Drops all local gradients. To be called whenever the state has changed or will."""
        for parameter in self.parameters:
            parameter.grad = None
        self._sums.zero_()
        self.forwards.copies.stale = True
        self._added.clear()
        self._spec = None
        self.stats = Stats()

    def take(self, groups: Sequence[AcceptedGroup], fetch: Fetch) -> RowShard:
        """This rank's share of ``groups``, for add_share(). Collective; see RowShards.take."""
        return self._shares.take(groups, self._totals, self.limits, fetch)

    def add(self, groups: Sequence[rollout_pb2.Group]) -> None:
        """Adds the gradients of groups that are in hand; of a sharded replica all ranks call it,
        with the same. Raises BadGroup, when nothing is added, and as add_share()."""
        self.add_share(self.share_of(groups, self._totals))

    def share_of(self, groups: Sequence[rollout_pb2.Group], totals: StepTotals) -> RowShard:
        """This rank's share of groups that every rank has. Raises BadGroup."""
        return self._shares.of(groups, totals, self.limits)

    def add_share(
        self,
        share: RowShard,
        around_last_row: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Adds the gradients of this rank's rows; of a sharded replica all ranks call it, each with
        its share.

        ``around_last_row``: entered for the forward and backward after which the gradients are
        complete.

        Raises BadGroup (ReplicaBroken with several ranks) if a row does not fit into memory, and
        EpochCancelled on every rank if the step was given up; all local gradients are dropped, and
        the step has to begin again.
        """
        totals = self._totals
        for number in range(share.rounds):
            last = number == share.rounds - 1
            mine = number < len(share.rows)
            # The forward of a sharded model is collective: a rank without a row of its own takes
            # part with one that counts nothing.
            row = share.rows[number] if mine else share.filler
            try:
                with around_last_row() if last else nullcontext():
                    micro = self.forwards.pack(share.batch, row, self.device)
                    self._add_row(share, micro, counts=mine)
            except torch.OutOfMemoryError as error:
                self.clear()  # a part of the row may be in the gradients
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()
                groups, why = share.in_words(row, error)
                if self.replica.size > 1:
                    # The other ranks wait in a collective of their rows: the replica has to die as
                    # one. Its groups become suspects, and are computed one by one from then on.
                    names = ", ".join(task_id for task_id, _ in groups[:8])
                    raise self.replica.given_up(f"groups {names}: {why}") from error
                raise BadGroup(why, groups, "out_of_memory") from error
            self.on_progress()
            # One integer over loopback for each micro-batch: ranks look at different moments.
            if not self.replica.agree(not self.left()):
                self.clear()
                raise EpochCancelled(f"step {totals.step} was given up")
        self._added.update(share.keys)
        if not self.state.config.recorded:
            count_rewards(self.stats, share.owned)
        if self.replica.leads:
            self.stats.add("loss", 0.0, share.trained / max(totals.sequences, 1))

    @property
    def _totals(self) -> StepTotals:
        if self._spec is None:
            raise RuntimeError("no step is open")
        return self._spec

    @cached_property
    def limits(self) -> ModelLimits:
        """Ids that every model of the step knows, and the policy's experts."""
        models = [*self.state.parts.values(), *self.frozen.values()]
        vocabulary = min(int(model.get_input_embeddings().num_embeddings) for model in models)
        layers = expert_layers(self.state.model)
        experts = min(map(experts_of, layers), default=0)
        return ModelLimits(vocabulary, routes_width(self.state.model), experts)

    @cached_property
    def operations_a_token(self) -> float:
        """Floating-point operations for a token of a row, over all models: 6 for a parameter that
        is trained, 4 for a frozen one below it, 2 for one of a model that is only asked. Of experts
        those count that a token goes to. What is recomputed and attention are left out (Chowdhery
        et al., PaLM, arXiv 2204.02311, appendix B)."""

        def weighed(model: nn.Module, trained: int, frozen: int) -> float:
            layers = expert_layers(model)
            chosen = routes_width(model) / len(layers) if layers else 0.0
            used = dict.fromkeys(model.parameters(), 1.0)
            for layer in layers:
                used |= dict.fromkeys(layer.experts.parameters(), chosen / experts_of(layer))
            each = [
                (trained if p.requires_grad else frozen) * p.numel() * n for p, n in used.items()
            ]
            return float(sum(each))

        of_parts = sum(weighed(model, 6, 4) for model in self.state.parts.values())
        return of_parts + sum(weighed(model, 2, 2) for model in self.frozen.values())

    def flatten(self, scratch: Tensor, ready: Collection[int] = ()) -> None:
        """Copies the local gradients and sums into ``scratch``, float32 [size]; zeros where there
        are none. Parameters ``ready`` (indices) are there already."""
        views = self.views(scratch)
        left = [i for i in range(len(views)) if i not in ready]
        with_gradient = [i for i in left if self.parameters[i].grad is not None]
        if empty := [views[i] for i in left if self.parameters[i].grad is None]:
            torch._foreach_zero_(empty)
        if with_gradient:
            torch._foreach_copy_(
                [views[i] for i in with_gradient],
                [local_tensor(self.parameters[i].grad) for i in with_gradient],
            )
        scratch[self._elements :] = self._sums

    def views(self, scratch: Tensor) -> list[Tensor]:
        """``scratch`` cut into the shapes of the parameters' local parts, in their order."""
        parts = scratch[: self._elements].split(self._sizes)
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def sums_of(self, scratch: Tensor) -> Tensor:
        """The objective's sums in ``scratch``, float32 [len(Objective.summed)]; a view."""
        return scratch[self._elements :]

    def _add_row(self, share: RowShard, micro: MicroBatch, *, counts: bool) -> None:
        scores, reference = self.forwards.scores(micro)
        tokens = share.columns.of(micro, self.device, reference)
        loss = self.objective.loss(scores, tokens)
        if scores.routers:
            loss = self._with_balance(loss, scores, tokens, share, micro.sequence_index)
        if not counts:
            (loss.total * 0.0).backward()
            return
        loss.total.backward()
        if loss.sums:
            sums = [loss.sums[name].detach().float() for name in self.objective.summed]
            self._sums += torch.stack(sums)
        self.stats.add("row_tokens", float(micro.input_ids.shape[1]), 1.0)
        measure(self.stats, scores, loss, tokens, sampled=not self.state.config.recorded)
        if of_layers := micro.packing.agreement:
            agreed, number = torch.stack(of_layers).sum(0)
            entry = torch.stack([agreed, number, agreed / number.clamp(min=1.0)])
            self.stats.add_on_device(["route_agreement"], entry[None])

    def _with_balance(
        self, loss: Loss, scores: TokenScores, tokens: TokenColumns[Tensor], of: RowShard, row: Ints
    ) -> Loss:
        """``loss`` with the load-balancing loss of experts."""
        places = tokens.trained, tokens.sequence_of, tokens.sequences
        balance = balance_of_sequences(scores.routers, *places, self.forwards.experts_per_token)
        settings = self.state.config.train.loss
        share = settings.router_aux_loss_coef / max(self._totals.sequences, 1)
        measured = Mean(balance.detach(), (balance > 0).float())
        means = {**loss.means, "router_balance": measured}
        shares = shares_of_units(of.batch, of.columns.trained, settings.branches)
        if shares is not None:
            balance = balance * to_device([shares[row]], self.device)[0]
        return replace(loss, total=loss.total + share * balance.sum(), means=means)
