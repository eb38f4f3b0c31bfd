"""Rows of the data set to prompt tokens, completion tokens to text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import AutoTokenizer

from paceline.config.schema import Config
from paceline.data import DataError, Message, prompt_of


class TokenizerError(Exception):
    """The tokenizer cannot be loaded; one line for people."""


class BadPrompt(Exception):
    """This row can never become a prompt. ``reason``: prompt_too_long, malformed_row."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Prompt:
    """``tokens`` int32 [n]; ``text``: what they say, template included."""

    tokens: NDArray[np.int32]
    text: str


class PromptTokenizer:
    """``limit``: most tokens of a prompt; set lower once the engine's context is known."""

    def __init__(self, config: Config) -> None:
        self._data = config.data
        self.limit = config.data.max_prompt_tokens
        path = config.model.tokenizer or config.model.path
        field = "model.tokenizer" if config.model.tokenizer else "model.path"
        if path.startswith(("/", ".", "~")) and not Path(path).expanduser().is_dir():
            raise TokenizerError(f"{field}: no such directory: {path}")
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(
                str(Path(path).expanduser()) if path.startswith("~") else path,
                trust_remote_code=config.model.trust_remote_code,
            )
        # Whatever transformers raises for a bad directory, name or file is bad input here.
        except Exception as error:
            line = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise TokenizerError(f"{field}: cannot load a tokenizer from {path}: {line}") from error
        if (config.data.chat or config.data.system_prompt) and not self._tokenizer.chat_template:
            raise TokenizerError(
                f"data.chat and data.system_prompt need a chat template; the tokenizer of {path} "
                f"has none"
            )
        self.end_tokens: tuple[int, ...] = (
            () if self._tokenizer.eos_token_id is None else (self._tokenizer.eos_token_id,)
        )

    def prompt(self, row: dict[str, Any]) -> Prompt:
        """Tokenises the row's prompt. Raises BadPrompt."""
        try:
            content = prompt_of(row, self._data)
        except DataError as error:
            raise BadPrompt("malformed_row", str(error)) from None
        if isinstance(content, str):
            text = content
            tokens = self._without_end(self._tokenizer(text).input_ids)
        else:
            # The template writes the special tokens itself.
            text = self._templated(content)
            tokens = self._tokenizer(text, add_special_tokens=False).input_ids
        if not tokens:
            raise BadPrompt("malformed_row", f"{self._data.prompt_field!r} gives no tokens")
        if len(tokens) > self.limit:
            raise BadPrompt("prompt_too_long", f"{len(tokens)} tokens, at most {self.limit}")
        return Prompt(np.array(tokens, dtype=np.int32), text)

    def decode(self, tokens: Sequence[int] | NDArray[np.int32]) -> str:
        """Text without special tokens."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def decode_many(self, completions: Sequence[NDArray[np.int32]]) -> list[str]:
        """The texts of several completions, without special tokens."""
        return list(self._tokenizer.batch_decode(completions, skip_special_tokens=True))

    def decode_all(self, tokens: Sequence[int]) -> str:
        """Text with special tokens: a stop string may name one."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))

    def _without_end(self, tokens: list[int]) -> list[int]:
        # Some tokenizers close every text with end-of-sequence; a prompt is to be continued.
        while tokens and tokens[-1] in self.end_tokens:
            tokens = tokens[:-1]
        return tokens

    def _templated(self, messages: list[Message]) -> str:
        if not self._tokenizer.chat_template:
            raise BadPrompt(
                "malformed_row", "chat messages, but the tokenizer has no chat template"
            )
        # A template is a program that comes with the tokenizer and fails in its own ways.
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True
                )
            )
        except Exception as error:
            raise BadPrompt("malformed_row", f"chat template: {error}") from error
