"""Forward passes of one row through every part of an objective, and the load-balancing loss of
experts.

The auxiliary loss of the Switch Transformer multiplies two means over a whole batch, so it is no
sum over groups, and a step that is split over replicas would have another one. The sequence-wise
form is such a sum:

    L = coefficient / sequences * sum over sequences of mean over layers of sum_i f_i P_i
    f_i = experts / (chosen * T) * (times that the router chose expert i in the sequence's T tokens)
    P_i = mean over those tokens of the router's probability of expert i

T counts trained tokens. f is a constant, the gradient goes through P. sum_i f_i P_i is 1 if all
experts get an equal share. Sources: DeepSeek-V3, arXiv 2412.19437, equations 17 to 20; the loss of
a batch: Switch Transformers, arXiv 2101.03961.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from paceline.expert_routes import expert_layers
from paceline.lora import without_adapters
from paceline.process.compute_device import compute_dtype
from policy_worker.model.attention import MicroBatch
from policy_worker.model.heads import score, values
from policy_worker.model.host_activations import HostActivations
from policy_worker.model.policy_model import ModelError
from policy_worker.model.precision import BfloatCopies
from policy_worker.model.train_state import TrainState, slices_again
from policy_worker.objectives.batch import Ints, TokenBatch
from policy_worker.objectives.columns import TokenScores
from policy_worker.objectives.objective import POLICY, REFERENCE, Objective
from policy_worker.rows.packing import pack


@dataclass(eq=False)
class RowForwards:
    """Forwards through the parts of ``state``, with graph, and the ``frozen`` ones, without."""

    objective: Objective
    state: TrainState
    frozen: Mapping[str, nn.Module]

    def __post_init__(self) -> None:
        heads = [p for p in (*self.objective.trains, *self.objective.frozen) if p.head == "scalar"]
        self._at = {part.name: part.at for part in heads}
        self._last_tokens = "token" in self._at.values()
        device = next(self.state.model.parameters()).device
        mixed = compute_dtype(self.state.config.model, device.type) == "bfloat16"
        leave = self.state.config.train.memory.offload_activations
        self._activations = HostActivations(device) if leave else None
        alone = [m for m in self.state.parts.values() if not isinstance(m, FSDPModule)]
        self.copies = BfloatCopies(alone if mixed else [])
        self._routers = self.state.config.train.loss.router_aux_loss_coef > 0
        self.experts_per_token = experts_per_token(self.state.model)
        """Experts of the main part that each token goes to; 0 if it is dense."""
        if self._routers and not self.experts_per_token:
            raise ModelError(
                f"train.loss.router_aux_loss_coef: {type(self.state.model).__name__} reports no "
                "logits of routers. Set it to 0, or train a mixture of experts that does"
            )

        if self.state.config.rollout.router_replay and not expert_layers(self.state.model):
            raise ModelError(
                f"rollout.router_replay: {type(self.state.model).__name__} has no layer of "
                "experts. Set it to false"
            )

    def pack(self, batch: TokenBatch, row: Ints, device: torch.device) -> MicroBatch:
        """The row, with the last tokens of its sequences if a scalar head reads them."""
        return pack(batch, row, device, last_tokens=self._last_tokens)

    def scores(self, micro: MicroBatch) -> tuple[TokenScores, Tensor | None]:
        """Scores of the row's targets, and the reference's log-probs [C] of them."""
        temperature = self.state.config.rollout.temperature
        parts, frozen = self.state.parts, self.frozen
        scalars = {name: float(number) for name, number in self.state.scalars.items()}
        resting = self.objective.resting(scalars)
        tokens = micro.input_ids.shape[1]
        self.copies.refresh()
        micro.packing.follows = False  # nor do critics: the routes are those of the policy
        # Before the others' activations are there.
        reference = self._reference(micro, temperature)
        with self._activations.of_row(tokens) if self._activations else nullcontext():
            none = torch.zeros(0, device=micro.input_ids.device)
            scores, outputs = TokenScores(none, none, none), {}
            for name, model in parts.items():
                with torch.set_grad_enabled(name not in resting):
                    if name == POLICY:
                        graph = self.objective.entropy_gradient
                        asked = {"entropy_gradient": graph, "routers": self._routers}
                        micro.packing.follows = True
                        scores = score(model, micro, temperature, **asked)
                        micro.packing.follows = False
                    else:
                        outputs[name] = values(model, micro, self._at[name])
                if name in resting or not torch.is_grad_enabled():
                    slices_again(model)
            with torch.no_grad():
                outputs |= {
                    n: values(frozen[n], micro, self._at[n]) for n in frozen if n != REFERENCE
                }
        constants = {name: output.detach() for name, output in outputs.items()}
        return replace(scores, values=outputs, values_before=constants, scalars=scalars), reference

    def _reference(self, micro: MicroBatch, temperature: float) -> Tensor | None:
        """Log-probs [C] of the reference, which may be the policy without its adapters."""
        if (model := self.frozen.get(REFERENCE)) is None:
            return None
        trained = model is self.state.parts.get(POLICY)
        with torch.no_grad(), without_adapters(model) if trained else nullcontext():
            logprobs = score(model, micro, temperature).logprobs
        if trained:
            slices_again(model)
        return logprobs


def balance_of_sequences(
    routers: Sequence[Tensor], trained: Tensor, sequence_of: Tensor, sequences: int, chosen: int
) -> Tensor:
    """Mean over layers of sum_i f_i P_i, of each sequence: float32 [sequences], with graph.
    routers: of each layer, logits [C, experts] at the positions that predict the tokens. trained:
    float32 [C], 1 or 0. sequence_of: int64 [C]. chosen: experts that a token goes to. 0 for a
    sequence without a trained token."""
    tokens = trained.new_zeros(sequences).index_add_(0, sequence_of, trained).clamp(min=1.0)
    total = trained.new_zeros(sequences)
    for logits in routers:
        experts = logits.shape[-1]
        probabilities = torch.softmax(logits.float(), -1) * trained[:, None]
        mean = trained.new_zeros(sequences, experts).index_add(0, sequence_of, probabilities)
        with torch.no_grad():
            picked = torch.zeros_like(probabilities).scatter_(
                1, logits.topk(chosen, -1).indices, trained[:, None].expand(-1, chosen)
            )
            share = torch.zeros_like(mean).index_add_(0, sequence_of, picked)
            share *= experts / chosen / tokens[:, None]
        total = total + (share * mean / tokens[:, None]).sum(-1)
    return total / max(len(routers), 1)


def experts_per_token(model: nn.Module) -> int:
    """Experts that each token goes to; 0 if ``model`` reports no logits of routers."""
    base = getattr(model, getattr(model, "base_model_prefix", ""), model)
    if "router_logits" not in (getattr(base, "_can_record_outputs", None) or {}):
        return 0
    return int(getattr(model.config.get_text_config(), "num_experts_per_tok", 0) or 0)
