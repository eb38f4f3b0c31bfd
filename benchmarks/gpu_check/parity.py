"""Parity of devices and types: log-probs and gradients of one row, against float32 on the CPU; and
of each architecture's packed rows with its sequences alone, on the device."""

import itertools
import tempfile
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_check.models import (
    TOY,
    make_gradients,
    make_group,
    make_model,
    run_config,
    trained_tokens,
)
from paceline.ids import Step, Version
from policy_worker.model import policy_model
from policy_worker.objectives.batch import StepTotals
from policy_worker.rows.group_reading import decode
from policy_worker.rows.probe import Unfit, probe
from testbed.architectures import ARCHITECTURES, tiny_architecture

ROW_TOKENS = 512
BOUNDS = {"float32": (1e-4, 1e-4), "bfloat16": (5e-2, 5e-2)}
"""Largest difference of a log-prob in nats, and of the gradient relative to its norm. float32 on
two devices differs by the order of its sums, bfloat16 by its 8 bits of mantissa."""


def parity(device: torch.device) -> list[dict[str, Any]]:
    """A row for each attention and type, compared on the CPU if there is no GPU."""
    torch.backends.cuda.matmul.allow_tf32 = False
    expected = measured(torch.device("cpu"), "float32")
    rows = []
    for attention, dtype in itertools.product(("sdpa", "flex"), BOUNDS):
        logprob_bound, gradient_bound = BOUNDS[dtype]
        found = measured(device, dtype, attention)
        logprob = float((found[0] - expected[0]).abs().max())
        gradient = float((found[1] - expected[1]).norm() / expected[1].norm())
        rows.append(
            {
                "device": device.type,
                "type": dtype,
                "attention": attention,
                "largest difference of a log-prob, nats": logprob,
                "difference of the gradient": gradient,
                "ok": logprob <= logprob_bound and gradient <= gradient_bound,
            }
        )
    return rows


def measured(device: torch.device, dtype: str, attention: str = "sdpa") -> tuple[Tensor, Tensor]:
    """Log-probs [tokens] and the flat gradient of one row, on the CPU."""
    model = make_model(TOY, device)
    config = run_config(dtype, ROW_TOKENS, attention=attention)
    gradients = make_gradients(model, config, device)
    group = make_group(TOY, ROW_TOKENS)
    batch = decode([group])
    micro = gradients.forwards.pack(batch, np.arange(len(batch.length)), device)
    with torch.no_grad():
        logprobs = gradients.forwards.scores(micro)[0].logprobs.detach().cpu()
    totals = StepTotals(Step(1), Version(0), trained_tokens(group), len(group.completions))
    gradients.begin(totals, [(group.task.task_id, group.task.attempt)])
    gradients.add([group])
    flat = torch.cat(
        [p.grad.reshape(-1).float().cpu() for p in gradients.parameters if p.grad is not None]
    )
    return logprobs, flat


def architectures(device: torch.device) -> list[dict[str, Any]]:
    """What a replica says of each before it trains: layers with a state compute with whatever
    kernels transformers finds on this machine."""
    config = run_config("float32", ROW_TOKENS, attention="sdpa").model
    rows = []
    for family in ARCHITECTURES:
        row: dict[str, Any] = {"architecture": family, "ok": True}
        try:
            with tempfile.TemporaryDirectory(prefix="paceline-gpu-check-") as name:
                tiny_architecture(family).save_pretrained(name)
                probe(policy_model.load_model(name, config, device), "lm", device)
        except Unfit as error:
            row |= {"ok": False, "refused": str(error)}
        rows.append(row)
    return rows
