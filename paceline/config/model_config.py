"""Facts from a model's config.json, read without transformers: a controller must not import torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def vocabulary_size(model: str) -> int | None:
    """Rows of the embedding of ``model`` (a directory, or a hub name that was downloaded before).

    None if this machine has no copy of the model's configuration. Nothing is downloaded.
    """
    try:
        facts: dict[str, Any] = json.loads(model_file(model, "config.json").read_text())
    except (OSError, ValueError, LookupError):
        return None
    # Multimodal models keep the language model's settings in a section of their own.
    size = facts.get("vocab_size") or facts.get("text_config", {}).get("vocab_size")
    return size if isinstance(size, int) and size > 0 else None


def model_file(model: str, name: str) -> Path:
    """The file ``name`` of a model's directory, or of the hub's cache. Raises LookupError if the
    cache has none."""
    directory = Path(model).expanduser()
    if directory.is_dir():
        return directory / name
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, name)
    if not isinstance(found, str):
        raise LookupError(model)
    return Path(found)
