"""Tokenizer: prompt tokens of rows and messages, text of completions."""

import contextlib
import copy
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import AutoTokenizer, PreTrainedTokenizerBase, TokenizersBackend
from transformers.utils import cached_file

from paceline.config.model_files import load_pretrained
from paceline.config.prompt_template import placeholders
from paceline.config.schema import Config
from paceline.dataset.messages import Message
from paceline.dataset.rows import DataError, prompt_of
from paceline.errors import BadInput

_CALLS = {
    "__call__": PreTrainedTokenizerBase,
    "decode": PreTrainedTokenizerBase,
    "_encode_plus": TokenizersBackend,
    "_decode": TokenizersBackend,
}
"""Methods of a tokenizer that only prepare a call of the package tokenizers, by their class."""
MOST_CUTS = 8
"""Attempts at truncating a prompt, after which it is dropped."""


class TokenizerError(BadInput):
    """The tokenizer cannot be loaded."""


class BadPrompt(Exception):
    """A row that can never become a prompt. ``reason``: prompt_too_long, malformed_row."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Prompt:
    """``tokens`` int32 [n], and their text, template included."""

    tokens: NDArray[np.int32]
    text: str
    cut: int = 0
    """Tokens that a too long prompt has lost."""


class PromptTokenizer:
    """``limit``: most tokens of a prompt; lowered once the engine's context is known."""

    def __init__(self, config: Config) -> None:
        self._data = config.data
        self.limit = config.data.max_prompt_tokens
        path = config.model.tokenizer or config.model.path
        field = "model.tokenizer" if config.model.tokenizer else "model.path"
        load, trust = AutoTokenizer.from_pretrained, config.model.trust_remote_code
        self._tokenizer: Any = load_pretrained(
            load, field, path, TokenizerError, trust_remote_code=trust
        )
        self._backend = self._fast_backend()
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
        self.end_tokens = self._turn_ends(config)
        """Tokens with which a turn ends, and generation stops: the tokenizer's end of sequence
        first, those of the model's generation config, and the one that the chat template writes
        after an answer."""
        # Llama 2 and its kind put a space before every text. Its parts must not be encoded alone.
        self._begins_texts = any(
            self.encode(f"\n{piece}")[len(self.encode("\n")) :] != self.encode(piece)
            for piece in ("a", " a")
        )
        count = len(self.encode(self._data.prompt_suffix)) if self._data.prompt_suffix else 0
        if count >= self.limit:
            raise TokenizerError(
                f"data.prompt_suffix has {count} tokens, and a prompt may have "
                f"data.max_prompt_tokens = {self.limit}: "
                "shorten it, or raise data.max_prompt_tokens"
            )

    def _fast_backend(self) -> Any:
        """The tokenizer of the package tokenizers: transformers' calls spend most of their time
        around it. None if they do more than to call it."""
        kind = type(self._tokenizer)
        own = any(
            getattr(kind, name, None) is not vars(base)[name] for name, base in _CALLS.items()
        )
        if own or self._tokenizer.clean_up_tokenization_spaces:
            return None  # its own code changes the text
        backend = self._tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        return backend

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
        if len(prompt.tokens) <= self.limit:
            return prompt
        if self._data.long_prompts != "drop":
            return self._truncated(row, prompt)
        raise BadPrompt("prompt_too_long", f"{len(prompt.tokens)} tokens, at most {self.limit}")

    def _truncated(self, row: dict[str, Any], whole: Prompt) -> Prompt:
        """The prompt of a row whose text is cut until the prompt fits. Raises BadPrompt."""
        prompt = whole
        # Tokens of a text alone and within its prompt may differ at the edges.
        for _ in range(MOST_CUTS):
            excess = len(prompt.tokens) - self.limit
            if excess <= 0:
                return Prompt(prompt.tokens, prompt.text, len(whole.tokens) - len(prompt.tokens))
            row = self._shortened(row, excess)
            prompt = self.opening(self.content_of(row))
        raise BadPrompt(
            "prompt_too_long",
            f"{len(whole.tokens)} tokens, at most {self.limit}, and it cannot be truncated to that",
        )

    def _shortened(self, row: dict[str, Any], excess: int) -> dict[str, Any]:
        """``row`` with a longest text of its prompt ``excess`` tokens shorter. Raises BadPrompt."""
        template, field = self._data.prompt_template, self._data.prompt_field
        row = copy.deepcopy(row)
        places = [(row, name) for name in ([field] if template is None else placeholders(template))]
        if template is None and isinstance(row[field], list):
            places = [(message, "content") for message in row[field] if message["role"] != "system"]
        texts = [place for place in places if isinstance(place[0].get(place[1]), str)]
        holder, name = max(texts, key=lambda place: len(place[0][place[1]]), default=(row, ""))
        tokens = self.encode(holder.get(name, ""))
        if len(tokens) <= excess:
            raise BadPrompt(
                "prompt_too_long",
                f"without any text of the row it would still have more than {self.limit} tokens",
            )
        left = self._data.long_prompts == "truncate_left"
        holder[name] = self.decode_all(tokens[excess:] if left else tokens[:-excess])
        return row

    def opening(
        self, content: str | Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> Prompt:
        """A prompt from text, or from messages and ``tools`` by the chat template. Raises
        BadPrompt."""
        if isinstance(content, str):
            text, tokens = content, self._ids(content)
            first = self._tokenizer.bos_token_id
            if first is not None and tokens[:2] == [first, first]:
                # The text begins with the token that the tokenizer writes before every text.
                tokens = tokens[1:]
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
        calls: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """The chat template's tokens of ``messages`` between two turns of the model. Raises
        BadPrompt.

        A marker takes the place of the turn before, whose reasoning a template may drop, and its
        ``last_token`` is not repeated if it ends a turn. ``calls``: the tool calls of that turn,
        which a template may need to render their results.
        """
        marker = f"turn-{secrets.token_hex(8)}"
        stand_in = _answered(marker)
        if calls:
            stand_in[-1]["tool_calls"] = [dict(call) for call in calls]
        turn = self._templated(stand_in, tools, answered=True) if calls else ""
        head, found, text = self._templated([*stand_in, *messages], tools).partition(marker)
        if not found:
            raise BadPrompt("malformed_row", "the chat template leaves out past assistant turns")
        if calls:
            # The turn has its calls in its own tokens: what ends a turn follows, and the messages.
            past = turn.partition(marker)[2]
            if not text.startswith(past):
                raise BadPrompt(
                    "malformed_row",
                    "the chat template renders a turn with tool calls differently once their "
                    "results follow, so the next turn cannot be appended to it",
                )
            text = self._templated(_answered(marker), tools, answered=True).partition(marker)[2] + (
                text.removeprefix(past)
            )
        before = head + marker
        if last_token in self.end_tokens:
            end = self.decode_all([last_token])
            before, text = before + end, text.removeprefix(end)
        return self.after(before, text)

    def takes_tools(self, tools: Sequence[Mapping[str, Any]]) -> bool:
        """True if the chat template renders ``tools``; many ignore them. Raises BadPrompt."""
        alone = [{"role": "user", "content": "-"}]
        return self._templated(alone, tools) != self._templated(alone)

    def encode(self, text: str) -> list[int]:
        """Tokens of ``text`` alone; names of special tokens become special tokens."""
        return self._ids(text, special=False)

    def _ids(self, text: str, *, special: bool = True) -> list[int]:
        if self._backend is None:
            return list(self._tokenizer(text, add_special_tokens=special).input_ids)
        return list(self._backend.encode(text, add_special_tokens=special).ids)

    def after(self, before: str, text: str) -> list[int]:
        """Tokens of ``text`` as it follows ``before``. Raises BadPrompt."""
        if not self._begins_texts:
            return self.encode(text)
        start, whole = self.encode(before), self.encode(before + text)
        if whole[: len(start)] != start:
            raise BadPrompt(
                "malformed_row",
                f"the tokenizer joins {text[:20]!r} with the text before it into one token, so "
                "what is trained cannot be told from the rest: let it begin with another character",
            )
        return whole[len(start) :]

    def _turn_ends(self, config: Config) -> tuple[int, ...]:
        ends = [self._tokenizer.eos_token_id, *_generation_ends(config.model.path)]
        if self._tokenizer.chat_template:
            with contextlib.suppress(BadPrompt):
                text = self._templated(_answered("-answer-"), answered=True)
                added = self._tokenizer.added_tokens_decoder
                special = {token for token, entry in added.items() if entry.special}
                special.update(self._tokenizer.all_special_ids)
                first = self.encode(text.partition("-answer-")[2])[:1]
                ends += [token for token in first if token in special]
        return tuple(dict.fromkeys(end for end in ends if end is not None))

    @property
    def has_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def decode(self, tokens: Sequence[int] | NDArray[np.int32]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def decode_many(self, completions: Sequence[NDArray[np.int32]]) -> list[str]:
        # Lists: transformers converts an array number by number.
        lists = [tokens.tolist() for tokens in completions]
        if self._backend is not None:
            return list(self._backend.decode_batch(lists, skip_special_tokens=True))
        return list(self._tokenizer.batch_decode(lists, skip_special_tokens=True))

    def decode_all(self, tokens: Sequence[int]) -> str:
        """Text with special tokens: a stop string may name one."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))

    @property
    def marks_answers(self) -> bool:
        return (
            re.search(r"\{%-?\s*generation\s*-?%\}", str(self._tokenizer.chat_template)) is not None
        )

    def conversation(self, messages: Sequence[Message]) -> str:
        """The chat template's text of whole ``messages``. Raises BadPrompt."""
        return self._templated(messages, answered=True)

    def answers(self, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
        """Tokens of whole ``messages``, and 1 for each that the template marks as the assistant's.
        Raises BadPrompt."""
        options = {"return_dict": True, "return_assistant_tokens_mask": True}
        found = self._apply_template(messages, tokenize=True, **options)
        return list(found["input_ids"]), [int(mark) for mark in found["assistant_masks"]]

    def _templated(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        answered: bool = False,
    ) -> str:
        functions = [dict(tool) for tool in tools] or None
        options = {"tools": functions, "add_generation_prompt": not answered}
        return str(self._apply_template(messages, tokenize=False, **options))

    def _apply_template(self, messages: Sequence[Message], **options: Any) -> Any:
        if not self._tokenizer.chat_template:
            raise BadPrompt(
                "malformed_row", "chat messages, but the tokenizer has no chat template"
            )
        # A template is a program of the tokenizer's author and may raise anything.
        try:
            return self._tokenizer.apply_chat_template(
                list(messages), **options, **self._data.chat_template_args
            )
        except Exception as error:
            raise BadPrompt("malformed_row", f"chat template: {error}") from error


def _answered(answer: str) -> list[Message]:
    return [{"role": "user", "content": "-"}, {"role": "assistant", "content": answer}]


def _generation_ends(path: str) -> list[int]:
    """End tokens of the model's generation config, else of its config."""
    for name in ("generation_config.json", "config.json"):
        found = cached_file(
            path,
            name,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        ends = json.loads(Path(found).read_text()).get("eos_token_id") if found else None
        if ends is not None:
            return [ends] if isinstance(ends, int) else list(ends)
    return []
