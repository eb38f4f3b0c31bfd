"""Export of a checkpoint to a directory that transformers and vLLM load: a Hugging Face model, or
adapters as PEFT writes them.

The weights come from the checkpoint, everything else (architecture, generation settings, tokenizer,
the base of adapters) from the model that the run started from. The directory appears whole or not
at all.
"""

import contextlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
)
from transformers.utils import logging as transformers_logging

from paceline.config.model_files import has_adapters
from paceline.config.sections.inputs import LoraConfig
from paceline.errors import BadInput
from paceline.lora import load_peft, merge_into, write_peft
from paceline.process.files import write_durably
from paceline.process.structured_log import first_line
from policy_worker.checkpoint.atomic_directory import locked_directory, put_in_place
from policy_worker.checkpoint.checkpoint import CheckpointError, read_meta
from policy_worker.checkpoint.shards import read_shards, stored_tensors, weights_of_part

MARKER = "paceline.json"
"""File that names an export's checkpoint. An existing directory is replaced only if it has one."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_TOKENIZER_FILES = (
    *("tokenizer*", "chat_template*", "added_tokens.json", "special_tokens_map.json"),
    *("vocab.json", "vocab.txt", "merges.txt"),
    *("*.tiktoken", "*spiece.model", "*sentencepiece.bpe.model"),
)


class ExportError(BadInput):
    """An export that failed. The message ends with the remedy."""


def export(
    checkpoint_dir: str | Path,
    model_path: str | Path | None,
    out_dir: str | Path,
    dtype: str | None = None,
    *,
    part: str | None = None,
    merge: bool = False,
    trust_remote_code: bool = False,
) -> Path:
    """Writes the weights of ``checkpoint_dir`` to ``out_dir`` as safetensors. Returns ``out_dir``.

    ``checkpoint_dir``: a checkpoint, or adapters in a directory as PEFT writes it. ``model_path``:
    directory or hub name of the original model; None: the one that the checkpoint names. ``part``:
    a part that the run trains, such as critic; None: the main one. One with a scalar head becomes
    an AutoModelForSequenceClassification. ``merge``: the whole model, with adapters added to its
    weights, instead of adapters. ``dtype``: float32, bfloat16 or float16; None: as stored, bit for
    bit, and merged weights in the type of the original. ``trust_remote_code``: run model code that
    comes with the original. Raises ExportError, and LoraError for adapters that cannot be read.
    """
    transformers_logging.disable_progress_bar()
    checkpoint, out = Path(checkpoint_dir).absolute(), Path(out_dir).absolute()
    if dtype is not None and dtype not in DTYPES:
        raise ExportError(f"dtype {dtype!r}: choose one of {', '.join(DTYPES)}")
    if out.exists() and not (out / MARKER).exists() and (not out.is_dir() or any(out.iterdir())):
        raise ExportError(f"{out} exists and is not an earlier export: choose another directory")
    if has_adapters(checkpoint):
        if part is not None or not merge:
            raise ExportError(f"{checkpoint} has adapters already: --merge adds them to their base")
        trained = _adapters_of(checkpoint)
    else:
        trained = _part_of(checkpoint, part)
    source = str(model_path or trained.source)
    lora, weights = trained.lora, trained.weights
    model: Any = None
    if lora is None:
        model = _model_of(source, weights, checkpoint, trained.head, trust_remote_code)
    elif merge:
        model = _merged(source, trained, lora, dtype, trust_remote_code)
    if dtype is not None and model is not None:
        model.to(DTYPES[dtype])
    elif dtype is not None:
        weights = {name: tensor.to(DTYPES[dtype]) for name, tensor in weights.items()}

    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial")
    with locked_directory(partial):
        try:
            for path in partial.iterdir():  # of an export that died
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            if model is not None:
                model.save_pretrained(partial)
            elif lora is not None:
                task = "SEQ_CLS" if trained.head == "scalar" else "CAUSAL_LM"
                base = Path(source)
                found = str(base.absolute()) if base.is_dir() else source
                write_peft(partial, weights, lora, found, task)
            _save_tokenizer(partial, str(trained.tokenizer or source), trust_remote_code)
            if trust_remote_code:
                for code in Path(source).glob("*.py"):
                    shutil.copyfile(code, partial / code.name)
            note = {"checkpoint": str(checkpoint)} | trained.note | {"model": source}
            write_durably(partial / MARKER, json.dumps(note, indent=1))
            put_in_place(partial, out)
        except OSError as error:
            raise ExportError(f"{out} cannot be written: {error}") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return out


@dataclass(frozen=True, slots=True)
class _Trained:
    """One part, as a checkpoint has it."""

    weights: dict[str, Tensor]
    head: str
    source: str
    """Directory or hub name of the original model."""
    tokenizer: str | None
    lora: LoraConfig | None
    """Settings of adapters; None: ``weights`` are a whole model's."""
    note: dict[str, Any]


def _part_of(checkpoint: Path, part: str | None) -> _Trained:
    try:
        meta = read_meta(checkpoint)
    except CheckpointError as error:
        raise ExportError(str(error)) from error
    # Checkpoints of releases before parts name none.
    policy = {"name": "policy", "head": "lm", "path": meta["model"]["path"]}
    parts = {found["name"]: found for found in meta.get("parts") or [policy]}
    main = next(iter(parts))
    if (chosen := parts.get(main if part is None else part)) is None:
        raise ExportError(f"{checkpoint} has no part {part!r}: choose one of {', '.join(parts)}")
    stored = stored_tensors(checkpoint)
    names = weights_of_part(stored, "" if chosen["name"] == main else chosen["name"])
    weights = {name: torch.empty(stored[name][0], dtype=stored[name][1]) for name in names}
    read_shards(checkpoint, weights)
    lora = meta.get("lora")
    return _Trained(
        {names[name]: tensor for name, tensor in weights.items()},
        head=chosen["head"],
        source=chosen["path"],
        tokenizer=meta["model"]["tokenizer"],
        lora=None if lora is None else LoraConfig.model_validate(lora),
        note={k: meta[k] for k in ("step", "version", "config_digest")},
    )


def _adapters_of(directory: Path) -> _Trained:
    """Adapters in PEFT's form, which may be an earlier export."""
    lora, base, task, weights = load_peft(directory)
    note: dict[str, Any] = {}
    if (directory / MARKER).is_file():
        note = json.loads((directory / MARKER).read_text())
    tokenizer = str(directory) if (directory / "tokenizer_config.json").is_file() else None
    head = "scalar" if task == "SEQ_CLS" else "lm"
    return _Trained(weights, head, base, tokenizer, lora, note)


def _merged(
    source: str, trained: _Trained, lora: LoraConfig, dtype: str | None, trust_remote_code: bool
) -> Any:
    """``source`` with the adapters added to its weights, and with its trained head."""
    kind, more = _kind(trained.head)
    # What the adapters add is less than bfloat16 can hold beside most weights.
    exact = torch.float32 if dtype == "float32" else "auto"
    try:
        model = kind.from_pretrained(
            source, dtype=exact, trust_remote_code=trust_remote_code, **more
        )
    except (OSError, ValueError) as error:
        raise _unreadable(source, error, trust_remote_code) from error
    heads = merge_into(model, trained.weights, lora)
    _, unexpected = model.load_state_dict(heads, strict=False)
    if unexpected:
        raise ExportError(
            f"{unexpected[0]} is not in {source} and no adapter of a linear layer (names that "
            f"differ: {len(unexpected)}): merge it with PEFT itself"
        )
    return model


def _kind(head: str) -> tuple[Any, dict[str, Any]]:
    """The class of a model with this head, and what its config has besides."""
    if head == "scalar":
        return AutoModelForSequenceClassification, {"num_labels": 1}
    return AutoModelForCausalLM, {}


def _unreadable(source: str, error: Exception, trust_remote_code: bool) -> ExportError:
    remedy = "name it with --model"
    if not trust_remote_code and "trust_remote_code" in str(error):
        remedy = "it comes with code of its own, which --trust-remote-code runs"
    return ExportError(
        f"the original model {source!r} cannot be read ({first_line(error)}): {remedy}"
    )


def _model_of(
    source: str, weights: dict[str, Tensor], checkpoint: Path, head: str, trust_remote_code: bool
) -> nn.Module:
    """The architecture of ``source`` around ``weights``; nothing of its own weights is read."""
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise _unreadable(source, error, trust_remote_code) from error
    kind, more = _kind(head)
    config.update(more)
    with torch.device("meta"):
        model: Any = kind.from_config(config, trust_remote_code=trust_remote_code)
    try:
        _, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    except RuntimeError as error:  # of shapes; the first line names the model alone
        why = str(error).splitlines()[-1].strip()
        raise ExportError(f"{checkpoint} is not of {source}: {why}") from error
    model.tie_weights()
    absent = [name for name, p in model.named_parameters() if p.is_meta]
    if strange := [*absent, *unexpected]:
        raise ExportError(
            f"{checkpoint} is not of {source}: {strange[0]} is in only one of them "
            f"(names that differ: {len(strange)})"
        )
    with contextlib.suppress(OSError, AttributeError):  # many models have none
        model.generation_config = GenerationConfig.from_pretrained(source)
    model.config.dtype = next(iter(weights.values())).dtype
    return model


def _save_tokenizer(out: Path, tokenizer: str, trust_remote_code: bool) -> None:
    folder = Path(tokenizer)
    if folder.is_dir():  # its files as they are: transformers would write another class
        for pattern in _TOKENIZER_FILES:
            for file in filter(Path.is_file, folder.glob(pattern)):
                shutil.copyfile(file, out / file.name)
        return
    try:
        found = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=trust_remote_code)
        found.save_pretrained(out)
    except (OSError, ValueError) as error:
        why = first_line(error)
        raise ExportError(f"the tokenizer {tokenizer!r} cannot be read ({why})") from error
