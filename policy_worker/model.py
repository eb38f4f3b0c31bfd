"""Loading of causal language models for training, with one-line errors for people."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from paceline.config.schema import Config
from paceline.config.training import ModelConfig
from paceline.errors import BadInput
from paceline.process.structured_log import first_line
from policy_worker.step import attention
from policy_worker.step.logprobs import make_scorer


class ModelError(BadInput):
    """A model that cannot be read or trained. The message names the field and the remedy."""


def pick_device(desired: str) -> torch.device:
    """The device of ``model.device``. ``auto``: the current CUDA device if torch finds one, else the CPU."""
    if desired == "cuda" and not torch.cuda.is_available():
        raise ModelError(
            "model.device = 'cuda', but torch finds no CUDA device; use 'auto' or 'cpu'"
        )
    if desired == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def load_model(
    path: str,
    config: ModelConfig,
    device: torch.device,
    *,
    field: str = "model.path",
    trainable: bool = True,
) -> nn.Module:
    """The model at ``path`` (directory or hub name) with float32 weights, ready for packed rows.

    Raises ModelError, which names ``field``, if it cannot be read.
    """
    attention.register()
    transformers_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=torch.float32,
            attn_implementation=attention.NAME,
            trust_remote_code=config.trust_remote_code,
        )
    except Exception as error:  # whatever makes a user's files unreadable
        raise ModelError(_unreadable(path, field, error)) from error
    try:
        make_scorer(model)
    except ValueError as error:
        raise ModelError(f"{field} = {path!r} cannot be trained: {error}") from error
    model.config.use_cache = False
    model.to(device)
    if trainable:
        # No dropout even if the config has some: the log-probs that the ratio compares must be those
        # of the policy that sampled.
        switch_off_dropout(model)
        model.train()
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        model.eval()
        model.requires_grad_(False)
    return model


def load_reference(config: Config, device: torch.device) -> nn.Module | None:
    """The frozen model of the KL term; None if kl_coef is 0."""
    if config.train.kl_coef == 0:
        return None
    path = config.train.reference_path
    field = "train.reference_path" if path else "model.path"
    return load_model(path or config.model.path, config.model, device, field=field, trainable=False)


def switch_off_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0


def _unreadable(path: str, field: str, error: Exception) -> str:
    reason = first_line(error)
    local = Path(path).expanduser()
    if local.exists() or path.startswith((".", "/", "~")):
        remedy = "name a directory with config.json and weights as safetensors"
        if not local.exists():
            reason = "no such directory"
    else:
        remedy = "name a local directory, or a hub model this machine can reach"
    return f"{field} = {path!r} cannot be loaded as a causal language model ({reason}): {remedy}"
