"""Vocabularies of models from their files, read without transformers and torch."""

import json
from pathlib import Path
from typing import Any


def vocabulary_size(model: str) -> int | None:
    """Rows of the embedding of ``model``, a directory or hub name; None without a copy here."""
    return _number(model, "vocab_size")


def positions(model: str) -> int | None:
    """Longest sequence that ``model`` takes, in tokens; None if its files, or those of a hub model
    without a copy here, do not say."""
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
    return next(filter(None, (_number(model, name) for name in names)), None)


def _number(model: str, name: str) -> int | None:
    try:
        facts: dict[str, Any] = json.loads(model_file(model, "config.json").read_text())
    except (OSError, ValueError, LookupError):
        return None
    # Multimodal models keep the language model's settings in a section of their own.
    number = facts.get(name) or facts.get("text_config", {}).get(name)
    return number if isinstance(number, int) and number > 0 else None


def context_length(model: str) -> int | None:
    """Most tokens of a sequence of ``model``; None without a limit or without a copy here."""
    try:
        facts: dict[str, Any] = json.loads(model_file(model, "config.json").read_text())
    except (OSError, ValueError, LookupError):
        return None
    facts = facts.get("text_config") or facts
    positions = facts.get("max_position_embeddings")
    if not isinstance(positions, int) or positions <= 0:
        return None
    factor = (facts.get("rope_scaling") or {}).get("factor")  # some engines allow so much more
    return (
        int(positions * max(1.0, float(factor))) if isinstance(factor, int | float) else positions
    )


def model_file(model: str, name: str) -> Path:
    """A file of a model's directory, or of the hub's cache. Raises LookupError."""
    directory = Path(model).expanduser()
    if directory.is_dir():
        return directory / name
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, name)
    if not isinstance(found, str):
        raise LookupError(model)
    return Path(found)


def difference(one: str, other: str) -> str:
    """The reason why two models have different token ids; empty if they have not, or nobody can
    tell.

    Vocabularies of tokenizer.json are compared if both have one: embeddings may be padded.
    """
    mine, theirs = _vocabulary(one), _vocabulary(other)
    if mine is None or theirs is None:
        rows, others = vocabulary_size(one), vocabulary_size(other)
        if rows is None or others is None or rows == others:
            return ""
        return f"embeddings of {rows} and {others} tokens"
    differing = {token for token, _ in mine.items() ^ theirs.items()}
    if not differing:
        return ""
    example = min(differing, key=lambda token: (len(token), token))
    return (
        f"{len(mine)} and {len(theirs)} tokens; {example!r} is {mine.get(example, 'none')} in one "
        f"and {theirs.get(example, 'none')} in the other"
    )


def misread(ours: str, theirs: str) -> str:
    """The same in one direction: ``theirs`` may know more tokens than ``ours``, and may have been
    saved without its tokenizer."""
    mine, others = _vocabulary(ours), _vocabulary(theirs)
    if mine is None:
        return ""
    rows, highest = vocabulary_size(theirs), max(mine.values(), default=0)
    if rows is not None and highest >= rows:
        return f"it knows {rows} tokens, and the run has ids up to {highest}"
    if others is None:
        return ""
    differing = [token for token, number in mine.items() if others.get(token) != number]
    if not differing:
        return ""
    example = min(differing, key=lambda token: (len(token), token))
    return (
        f"{len(differing)} tokens differ; {example!r} is {mine[example]} in the run and "
        f"{others.get(example, 'none')} in the scorer"
    )


def _vocabulary(model: str) -> dict[str, int] | None:
    """Id of each token, added ones included; None without a readable tokenizer.json."""
    try:
        facts: dict[str, Any] = json.loads(model_file(model, "tokenizer.json").read_text())
        found = facts["model"]["vocab"]
        # Unigram models list pairs of a token and its score.
        ids = dict(found) if isinstance(found, dict) else {t: i for i, (t, _) in enumerate(found)}
        return ids | {added["content"]: added["id"] for added in facts.get("added_tokens", ())}
    except (OSError, ValueError, LookupError, TypeError):
        return None
