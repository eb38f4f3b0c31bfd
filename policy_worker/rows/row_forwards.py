"""Forward passes of one row through every part of an objective."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from policy_worker.model.policy_model import ModelError
from policy_worker.model.train_state import TrainState
from policy_worker.objectives.objective import Objective
from policy_worker.objectives.part import POLICY, REFERENCE
from policy_worker.offload.activations import activations_on_host
from policy_worker.ranks.gradient_sync import slices_again
from policy_worker.rows.logprobs import TokenScores, score
from policy_worker.rows.packing import MicroBatch, pack
from policy_worker.rows.router_balance import experts_per_token
from policy_worker.rows.value_head import values
from policy_worker.step.batch import Ints, TokenBatch


@dataclass(eq=False)
class RowForwards:
    """Of the parts of ``state``, with graph, and of the ``frozen`` ones, without."""

    objective: Objective
    state: TrainState
    frozen: Mapping[str, nn.Module]

    def __post_init__(self) -> None:
        heads = [p for p in (*self.objective.trains, *self.objective.frozen) if p.head == "scalar"]
        self._at = {part.name: part.at for part in heads}
        self._last_tokens = "token" in self._at.values()
        self._routers = self.state.config.train.router_aux_loss_coef > 0
        self.experts_per_token = experts_per_token(self.state.model)
        """Of the main part; 0 if it is dense."""
        if self._routers and not self.experts_per_token:
            raise ModelError(
                f"train.router_aux_loss_coef: {type(self.state.model).__name__} reports no logits of routers. Set it to 0, "
                "or train a mixture of experts that does"
            )

    def pack(self, batch: TokenBatch, row: Ints, device: torch.device) -> MicroBatch:
        """The row, with the last tokens of its sequences if a scalar head reads them."""
        return pack(batch, row, device, last_tokens=self._last_tokens)

    def scores(self, micro: MicroBatch) -> tuple[TokenScores, Tensor | None]:
        """Scores of the row's targets, and the reference's log-probs [C] of them."""
        temperature = self.state.config.rollout.temperature
        chunk = self.state.config.train.logits_chunk_mb
        parts, frozen = self.state.parts, self.frozen
        scalars = {name: float(number) for name, number in self.state.scalars.items()}
        resting = self.objective.resting(scalars)
        with self._precision(micro), self._placement(micro):
            scores, outputs = _no_policy(micro), {}
            for name, model in parts.items():
                with torch.set_grad_enabled(name not in resting):
                    if name == POLICY:
                        graph = self.objective.entropy_gradient
                        asked = {"entropy_gradient": graph, "routers": self._routers}
                        scores = score(model, micro, temperature, chunk_mb=chunk, **asked)
                    else:
                        outputs[name] = values(model, micro, self._at[name])
                if name in resting or not torch.is_grad_enabled():
                    slices_again(model)
            with torch.no_grad():
                outputs |= {
                    n: values(frozen[n], micro, self._at[n]) for n in frozen if n != REFERENCE
                }
                reference = (
                    score(frozen[REFERENCE], micro, temperature, chunk_mb=chunk).logprobs
                    if REFERENCE in frozen
                    else None
                )
        constants = {name: output.detach() for name, output in outputs.items()}
        return replace(scores, values=outputs, values_before=constants, scalars=scalars), reference

    def _precision(self, micro: MicroBatch) -> AbstractContextManager[object]:
        """Context manager around a forward."""
        # Autocast rather than a second copy in bf16: one set of weights to transfer, reduce and
        # checkpoint, and gradients arrive in float32. Its price is a cast per row.
        if self.state.config.model.dtype != "bfloat16":
            return nullcontext()
        mixed: AbstractContextManager[object] = torch.autocast(
            micro.input_ids.device.type, torch.bfloat16
        )
        return mixed

    def _placement(self, micro: MicroBatch) -> AbstractContextManager[object]:
        """Context manager around a forward whose activations may leave the device."""
        if not self.state.config.train.offload_activations:
            return nullcontext()
        return activations_on_host(micro.input_ids.shape[1])


def _no_policy(micro: MicroBatch) -> TokenScores:
    none = torch.zeros(0, device=micro.input_ids.device)
    return TokenScores(none, none, none)
