"""Models' files: what is read without transformers and torch, and the loader of a user's path."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from paceline.config.sections.inputs import SETTINGS_FILE
from paceline.errors import BadInput, one_line

Loaded = TypeVar("Loaded")


def has_adapters(directory: Path) -> bool:
    """True for adapters as PEFT writes them."""
    return (directory / SETTINGS_FILE).is_file()


def load_pretrained(
    load: Callable[..., Loaded], setting: str, path: str, error: type[BadInput], **arguments: Any
) -> Loaded:
    """Calls a ``from_pretrained`` of transformers. ``setting``: that names ``path``, a directory or
    hub name. Raises ``error``."""
    if path.startswith(("/", ".")) and not Path(path).is_dir():
        raise error(f"{setting}: no such directory: {path}")
    try:
        return load(path, **arguments)
    # Whatever it raises for a bad directory, name, file or config is bad input here.
    except Exception as problem:
        raise error(f"{setting}: cannot load {path}: {one_line(problem)}") from problem


def vocabulary_size(model: str) -> int | None:
    """Rows of the embedding of ``model``, a directory or hub name; None without a copy here."""
    return _number(model, "vocab_size")


def positions(model: str) -> int | None:
    """Longest sequence that ``model`` takes, in tokens; None if its files, or those of a hub model
    without a copy here, do not say."""
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
    return _number(model, *names)


def context_length(model: str) -> int | None:
    """The same with the stretch of its rope scaling, which some engines allow."""
    longest = positions(model)
    config = _read(model, "config.json")
    scaling = (config.get("text_config") or config).get("rope_scaling") or {}
    factor = scaling.get("factor", 1.0)
    return longest and int(longest * max(1.0, factor if isinstance(factor, int | float) else 1.0))


def _number(model: str, *names: str) -> int | None:
    config = _read(model, "config.json")
    # Multimodal models keep the language model's settings in a section of their own.
    places = (config, config.get("text_config") or {})
    numbers = (place.get(name) for name in names for place in places)
    return next((n for n in numbers if isinstance(n, int) and n > 0), None)


def _read(model: str, name: str) -> dict[str, Any]:
    """Content of a JSON file of ``model``; empty without a readable copy here."""
    try:
        found = json.loads(model_file(model, name).read_text())
    except (OSError, ValueError, LookupError):
        return {}
    return found if isinstance(found, dict) else {}


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


def weights_fingerprint(model: str) -> str:
    """Equal for equal weights, whatever files they are split into: names, types, shapes and some
    bytes from the middle of each tensor. Empty without readable safetensors here."""
    found: dict[str, bytes] = {}
    try:
        folder = model_file(model, "config.json").parent
        for path in folder.glob("*.safetensors"):
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(size))
                for name, tensor in header.items():
                    if name != "__metadata__":
                        start, end = tensor["data_offsets"]
                        file.seek(8 + size + (start + end) // 2)
                        sample = file.read(min(256, (end - start) // 2))
                        found[name] = (
                            f"{name} {tensor['dtype']} {tensor['shape']}".encode() + sample
                        )
    except (OSError, ValueError, LookupError, TypeError):
        return ""
    joined = b"\0".join(found[name] for name in sorted(found))
    return hashlib.sha256(joined).hexdigest()[:32] if found else ""


def difference(ours: str, theirs: str, *, exact: bool = True) -> str:
    """The reason why the model ``theirs`` misreads token ids of ``ours``; empty if it does not, or
    nobody can tell.

    Vocabularies of tokenizer.json are compared if both have one: embeddings may be padded. Not
    ``exact``: it may know more tokens, and may have been saved without its tokenizer.
    """
    mine, others = _vocabulary(ours), _vocabulary(theirs)
    rows, highest = vocabulary_size(theirs), max((mine or {}).values(), default=0)
    if not exact and rows is not None and highest >= rows:
        return f"it knows {rows} tokens, and the run has ids up to {highest}"
    if mine is None or others is None:
        needed = vocabulary_size(ours) if exact else None
        if needed is None or rows is None or needed == rows:
            return ""
        return f"embeddings of {needed} and {rows} tokens"
    tokens = mine.keys() | others.keys() if exact else mine.keys()
    differing = [token for token in tokens if mine.get(token) != others.get(token)]
    if not differing:
        return ""
    token = min(differing, key=lambda token: (len(token), token))
    number, other = mine.get(token, "none"), others.get(token, "none")
    return f"{len(differing)} tokens differ; {token!r} is {number} in the run and {other} in it"


def _vocabulary(model: str) -> dict[str, int] | None:
    """Id of each token, added ones included; None without a readable tokenizer.json."""
    tokenizer = _read(model, "tokenizer.json")
    try:
        found = tokenizer["model"]["vocab"]
        # Unigram models list pairs of a token and its score.
        ids = dict(found) if isinstance(found, dict) else {t: i for i, (t, _) in enumerate(found)}
        return ids | {added["content"]: added["id"] for added in tokenizer.get("added_tokens", ())}
    except (ValueError, LookupError, TypeError):
        return None
