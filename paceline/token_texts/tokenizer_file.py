"""Tokenizer file of a model: the one that the tokenizers library reads without transformers."""

from __future__ import annotations

from pathlib import Path

from paceline.config.schema import Config

NAME = "tokenizer.json"


def tokenizer_file(config: Config) -> Path | None:
    """Where the run's tokenizer is on this host: in the model's directory, or in the cache of the
    hub. None if it is not there. Nothing is downloaded."""
    place = config.model.tokenizer or config.model.path
    directory = Path(place).expanduser()
    if directory.is_dir() or place.startswith(("/", ".", "~")):
        file = directory / NAME
        return file if file.is_file() else None
    try:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(place, NAME)
    except (ImportError, ValueError):  # ValueError: no name of a repository
        return None
    return Path(cached) if isinstance(cached, str) else None
