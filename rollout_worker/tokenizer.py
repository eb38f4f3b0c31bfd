"""Tokenizer: prompt tokens of rows and messages, text of completions."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import AutoTokenizer

from paceline.config.schema import Config
from paceline.dataset.rows import DataError, Message, prompt_of
from paceline.errors import BadInput
from rollout_worker.failures import AttemptFailed, one_line


class TokenizerError(BadInput):
    """The tokenizer cannot be loaded."""


class BadPrompt(AttemptFailed):
    """This row can never become a prompt. ``reason``: prompt_too_long, malformed_row."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """``tokens`` int32 [n]; ``text``: of these tokens, template included."""

    tokens: NDArray[np.int32]
    text: str


class PromptTokenizer:
    """``limit``: most tokens of a prompt; lowered once the engine's context is known."""

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
            why = f"cannot load a tokenizer from {path}: {one_line(error)}"
            raise TokenizerError(f"{field}: {why}") from error
        if len(self._tokenizer) <= len(self._tokenizer.all_special_ids):
            # For a directory without tokenizer files, transformers makes an empty tokenizer.
            raise TokenizerError(
                f"{field}: there is no tokenizer in {path}: save it there, or set model.tokenizer"
            )
        if (config.data.chat or config.data.system_prompt) and not self._tokenizer.chat_template:
            raise TokenizerError(
                f"data.chat and data.system_prompt need a chat template; the tokenizer of {path} "
                f"has none"
            )
        self.end_tokens: tuple[int, ...] = (
            () if self._tokenizer.eos_token_id is None else (self._tokenizer.eos_token_id,)
        )
        self._special = {*self._tokenizer.all_special_ids, *self.end_tokens}

    def content_of(self, row: dict[str, Any]) -> str | list[Message]:
        """The row's prompt, not tokenised. Raises BadPrompt."""
        try:
            return prompt_of(row, self._data)
        except DataError as error:
            raise BadPrompt("malformed_row", str(error)) from None

    def prompt(self, row: dict[str, Any]) -> Prompt:
        """Tokenises the row's prompt. Raises BadPrompt."""
        prompt = self.opening(self.content_of(row))
        if not len(prompt.tokens):
            raise BadPrompt("malformed_row", f"{self._data.prompt_field!r} gives no tokens")
        if len(prompt.tokens) > self.limit:
            raise BadPrompt("prompt_too_long", f"{len(prompt.tokens)} tokens, at most {self.limit}")
        return prompt

    def opening(
        self, content: str | Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> Prompt:
        """A prompt from text as it is, or from messages and ``tools`` through the chat template.

        Raises BadPrompt.
        """
        if isinstance(content, str):
            text, tokens = content, self._tokenizer(content).input_ids
            # Some tokenizers append end-of-sequence to every text, but a prompt is continued.
            while tokens and tokens[-1] in self.end_tokens:
                tokens = tokens[:-1]
        else:
            # The template writes the special tokens itself.
            text = self._templated(content, tools)
            tokens = self.encode(text)
        return Prompt(np.array(tokens, dtype=np.int32), text)

    def following(
        self,
        messages: Sequence[Message],
        last_token: int,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """The chat template's tokens between a turn of the model and its next one.

        ``messages``: those in between. ``last_token``: of the model's turn; if it is the special token
        that ends a turn in the template, it is not repeated. Raises BadPrompt.

        The turn itself is not rendered, because a template may render past turns differently than
        the model wrote them (drop their reasoning, trim blanks). A marker takes its place.
        """
        marker = f"turn-{secrets.token_hex(8)}"
        stand_in = [
            {"role": "user", "content": "-"},
            {"role": "assistant", "content": marker},
        ]
        _, found, text = self._templated([*stand_in, *messages], tools).partition(marker)
        if not found:
            raise BadPrompt("malformed_row", "the chat template leaves out past assistant turns")
        if last_token in self._special:
            text = text.removeprefix(self.decode_all([last_token]))
        return self.encode(text)

    def takes_tools(self, tools: Sequence[Mapping[str, Any]]) -> bool:
        """True if the chat template renders ``tools`` into a prompt; many ignore them silently.

        Raises BadPrompt if it cannot render them.
        """
        alone = [{"role": "user", "content": "-"}]
        return self._templated(alone, tools) != self._templated(alone)

    def encode(self, text: str) -> list[int]:
        """Tokens of ``text`` alone; names of special tokens become special tokens."""
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)

    @property
    def has_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def decode(self, tokens: Sequence[int] | NDArray[np.int32]) -> str:
        """Text without special tokens."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def decode_many(self, completions: Sequence[NDArray[np.int32]]) -> list[str]:
        """The texts of several completions, without special tokens."""
        return list(self._tokenizer.batch_decode(completions, skip_special_tokens=True))

    def decode_all(self, tokens: Sequence[int]) -> str:
        """Text with special tokens: a stop string may name one."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))

    def _templated(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        if not self._tokenizer.chat_template:
            raise BadPrompt(
                "malformed_row", "chat messages, but the tokenizer has no chat template"
            )
        # A template is a program of the tokenizer's author and may raise anything.
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages),
                    tools=[dict(tool) for tool in tools] or None,
                    tokenize=False,
                    add_generation_prompt=True,
                )
            )
        except Exception as error:
            raise BadPrompt("malformed_row", f"chat template: {error}") from error
