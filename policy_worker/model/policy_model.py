"""Loading of an objective's parts: language models and models with a scalar head, with one-line
errors for people."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging as transformers_logging

from paceline.config.sections.inputs import ModelConfig
from paceline.errors import BadInput
from paceline.lora import attach
from paceline.model_shape import blocks_of
from paceline.process.compute_device import attention_of, compiles
from paceline.process.structured_log import first_line
from policy_worker.model import attention
from policy_worker.model.heads import (
    COMPILED,
    HEAD,
    Headless,
    inductor,
    make_scorer,
    make_value_head,
)
from policy_worker.model.precision import cast_frozen
from policy_worker.model.row_layers import tell_layers


class ModelError(BadInput):
    """A model that cannot be read or trained. The message names the field and the remedy."""


def empty_model(
    path: str,
    config: ModelConfig,
    *,
    head: str = "lm",
    trainable: bool = True,
    frozen: torch.dtype = torch.float32,
) -> nn.Module:
    """The model of load_model(), with parameters on torch's meta device, without memory or values;
    buffers have both. Raises ModelError, and whatever the model's own code raises if it cannot be
    made so."""
    lm = head == "lm"
    labels = {} if lm else {"num_labels": 1}
    stored = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code, **labels)
    make = AutoModelForCausalLM if lm else AutoModelForSequenceClassification
    with _parameters_on_meta(), _quiet():
        model = make.from_config(stored, **_reading(config))
    (make_scorer if lm else make_value_head)(model)
    return _prepared(model, config, None, trainable=trainable, frozen=frozen)


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules made inside have their parameters on the meta device; unlike inside
    torch.device("meta"), not their buffers, whose values no file has."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:  # a tied one stays the same object
            parameter = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def load_model(
    path: str,
    config: ModelConfig,
    device: torch.device,
    *,
    head: str = "lm",
    field: str = "model.path",
    trainable: bool = True,
    frozen: torch.dtype = torch.float32,
) -> nn.Module:
    """The model at ``path`` (directory or hub name), ready for packed rows. Weights that are
    trained are float32, others of the type ``frozen``: all if it is not ``trainable``, and with
    [model.lora] all but adapters, which are zeros, and a scalar head.

    ``head``: lm for a causal language model. scalar for one number for each token: of a sequence
    classifier with one label, or of a causal language model, whose head is replaced by zeros.

    Raises ModelError, which names ``field``.
    """
    transformers_logging.disable_progress_bar()
    try:
        if head == "lm":
            model = AutoModelForCausalLM.from_pretrained(path, **_reading(config))
            make_scorer(model)
        else:
            model = _read_scalar(path, config)
    except Headless as error:
        raise ModelError(f"{field} = {path!r} cannot be trained: {error}") from error
    except Exception as error:  # whatever makes a user's files unreadable
        what = "a causal language model" if head == "lm" else "a model with a scalar head"
        raise ModelError(_unreadable(path, field, error, what)) from error
    return _prepared(model, config, device, trainable=trainable, frozen=frozen)


def _read_scalar(path: str, config: ModelConfig) -> nn.Module:
    stored = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code)
    classifier = "ForSequenceClassification" in " ".join(stored.architectures or ())
    if classifier and stored.num_labels != 1:
        raise Headless(
            f"it is a classifier of {stored.num_labels} labels, and a scalar head has one: name "
            "one with num_labels = 1, or a causal language model, whose head is replaced"
        )
    with _quiet():
        model, found = AutoModelForSequenceClassification.from_pretrained(
            path,
            num_labels=1,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **_reading(config),
        )
    make_value_head(model)
    missing = set(found["missing_keys"])
    if absent := sorted(missing if classifier else missing - {f"{HEAD}.weight"}):
        raise Headless(f"its files lack {absent[0]}")
    if missing:
        torch.nn.init.zeros_(getattr(model, HEAD).weight)
    return model


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' report of a missing head, which is meant to be."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


ATTENTION = {"sdpa": attention.BLOCKS, "flex": attention.FLEX}
"""Names by attention_of()."""


def _reading(config: ModelConfig) -> dict[str, Any]:
    attention.register()
    return {
        "dtype": torch.float32,
        "attn_implementation": ATTENTION[attention_of(config)],
        "trust_remote_code": config.trust_remote_code,
    }


def _prepared(
    model: nn.Module,
    config: ModelConfig,
    device: torch.device | None,
    *,
    trainable: bool,
    frozen: torch.dtype = torch.float32,
) -> nn.Module:
    model.config.use_cache = False
    tell_layers(model)
    if not trainable:
        model.requires_grad_(False)
    elif config.lora is not None:
        attach(model, config.lora)
        if isinstance(head := getattr(model, HEAD, None), nn.Module):
            head.requires_grad_(True)
    if not trainable or config.lora is not None:
        cast_frozen(model, frozen)
    if device is not None:
        model.to(device)
    # No dropout and no noise even if the config has some: the log-probs that the ratio compares
    # must be those of the policy that sampled.
    model.eval()
    if trainable:
        if config.recomputes:
            try:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            except ValueError as error:
                problem = f"{first_line(error)} Set model.gradient_checkpointing = false"
                raise ModelError(problem) from error
            _recompute(model)
        whole = getattr(model, "_can_compile_fullgraph", False)  # by default, no routing by data
        if compiles(config) and (whole or config.compile is True):
            compile_model(model)
    return model


def _recompute(model: nn.Module) -> None:
    """Training mode for the modules that checkpoint their gradients, because transformers asks for
    it, and for none inside them. Their own dropout is 0; ``rows.probe`` sees what else they
    draw."""
    asked = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    # Models with such layers carry the attribute themselves, too, and draw for it if they train.
    layers = [m for m in asked if isinstance(m, GradientCheckpointingLayer)]
    for module in layers or asked:
        module.training = True
        for name, value in list(vars(module).items()):
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def _unreadable(path: str, field: str, error: Exception, what: str) -> str:
    reason = first_line(error)
    if any(name in reason for name in ATTENTION.values()):
        return (
            f"{field} = {path!r} cannot be trained: its layers have attention of their own (GPT-J "
            "and Falcon, for example), and rows without padding need another: name a model of "
            "another architecture"
        )
    local = Path(path).expanduser()
    if local.exists() or path.startswith((".", "/", "~")):
        remedy = "name a directory with config.json and weights as safetensors"
        if not local.exists():
            reason = "no such directory"
    else:
        remedy = "name a local directory, or a hub model this machine can reach"
    return f"{field} = {path!r} cannot be loaded as {what} ({reason}): {remedy}"


def compile_model(model: nn.Module) -> None:
    """Has each of its blocks compiled at its first call, and the head of a language model, for rows
    of any length. To be called before they are sharded. Attention stays as it is: its Python runs
    over the sequences of a row, which differ from row to row, and a compiled copy would be made for
    each kind of row."""
    config: Any = model.config
    name = config._attn_implementation
    ALL_ATTENTION_FUNCTIONS.register(name, torch.compiler.disable(ALL_ATTENTION_FUNCTIONS[name]))
    setattr(model, COMPILED, True)
    for block in blocks_of(model):
        # Inside the block's gradient checkpoint, which is in its __call__.
        block.compile(dynamic=True, backend=inductor)
