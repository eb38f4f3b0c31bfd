"""Texts of tokens, for programs that import no transformers.

Rollout workers leave out texts that a reader can decode. The tokenizers library decodes without the
interpreter's lock, so that a thread of the controller may do it.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from paceline.config.model_files import model_file
from paceline.config.schema import Config
from paceline.process.structured_log import event
from paceline.v1 import rollout_pb2

if TYPE_CHECKING:
    from tokenizers import Tokenizer

log = logging.getLogger(__name__)

NAME = "tokenizer.json"


class TextDecoder:
    """Decoder of one run's tokens. Methods block, and may be called from any thread."""

    def __init__(self, config: Config) -> None:
        self._file = tokenizer_file(config)
        # Transcripts of environments and recorded conversations show their markers.
        self._special = config.recorded or config.rollout.environment is not None
        self._loading = threading.Lock()
        self._tokenizer: Tokenizer | None = None

    @property
    def available(self) -> bool:
        """True if the run's tokenizer is here: then workers need not send texts."""
        return self._file is not None

    def fill(self, group: rollout_pb2.Group) -> None:
        """Decodes the texts that ``group`` lacks. Without a tokenizer they stay empty."""
        if (tokenizer := self._loaded()) is None:
            return
        if not group.prompt_text and group.prompt_tokens:
            prompt = _ids(group.prompt_tokens)
            group.prompt_text = tokenizer.decode(prompt, skip_special_tokens=False)
        lacking = [c for c in group.completions if not c.text and c.tokens]
        ids = [_ids(completion.tokens) for completion in lacking]
        texts = tokenizer.decode_batch(ids, skip_special_tokens=not self._special)
        for completion, text in zip(lacking, texts, strict=True):
            completion.text = text

    def _loaded(self) -> Tokenizer | None:
        with self._loading:
            if self._tokenizer is None and self._file is not None:
                from tokenizers import Tokenizer

                try:
                    self._tokenizer = Tokenizer.from_file(str(self._file))
                except Exception as error:  # the library raises nothing narrower
                    event(log, "texts not decoded", logging.WARNING, why=str(error))
                    self._file = None
            return self._tokenizer


def _ids(tokens: bytes) -> list[int]:
    ids: list[int] = np.frombuffer(tokens, "<i4").tolist()
    return ids


def tokenizer_file(config: Config) -> Path | None:
    """The run's tokenizer on this host, or None. Nothing is downloaded."""
    try:
        file = model_file(config.model.tokenizer or config.model.path, NAME)
    except (ImportError, ValueError, LookupError):  # ValueError: no name of a repository
        return None
    return file if file.is_file() else None
