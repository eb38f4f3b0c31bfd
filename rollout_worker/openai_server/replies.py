"""Turns as /v1/chat/completions tells them, whole or as a stream of server-sent events."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from rollout_worker.environments.base import Turn
from rollout_worker.openai_server.tools import calls_in
from rollout_worker.tokenizer import PromptTokenizer


@dataclass(frozen=True, slots=True)
class Reply:
    model: str
    tokenizer: PromptTokenizer
    logprobs: bool
    calls: str = ""
    """What the ids of tool calls begin with; empty: calls are told as text."""
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, turn: Turn) -> dict[str, Any]:
        said, finish = self._said(turn)
        return {
            **self._head("chat.completion", turn),
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "refusal": None, **said},
                    "logprobs": self._logprobs(turn),
                    "finish_reason": finish,
                }
            ],
            "usage": _usage(turn),
        }

    def first_chunk(self) -> bytes:
        """Sent before the turn is there."""
        return _event(self._chunk({"role": "assistant", "content": "", "refusal": None}))

    def chunks(self, turn: Turn, *, usage: bool) -> Iterator[bytes]:
        """The turn, its end, its usage, and the end of the stream."""
        said, finish = self._said(turn)
        for index, call in enumerate(said.get("tool_calls", ())):
            call["index"] = index
        yield _event(self._chunk(said, turn))
        yield _event(self._chunk({}, turn, finish=finish))
        if usage:
            yield _event(
                {
                    **self._head("chat.completion.chunk", turn),
                    "choices": [],
                    "usage": _usage(turn),
                }
            )
        yield b"data: [DONE]\n\n"

    def _said(self, turn: Turn) -> tuple[dict[str, Any], str]:
        """content and, where there are any, tool_calls; and the finish_reason."""
        rest, calls = calls_in(turn.text) if self.calls else (turn.text, [])
        if not calls:
            return {"content": turn.text}, turn.finish
        told = [
            {
                # The same when the turn is told again.
                "id": f"{self.calls}_{turn.prompt_tokens}_{index}",
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.dumps(call.arguments, ensure_ascii=False),
                },
            }
            for index, call in enumerate(calls)
        ]
        finish = "tool_calls" if turn.finish == "stop" else turn.finish
        return {"content": rest or None, "tool_calls": told}, finish

    def _chunk(
        self, delta: dict[str, Any], turn: Turn | None = None, finish: str | None = None
    ) -> dict[str, Any]:
        logprobs = self._logprobs(turn) if turn is not None and delta else None
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return {**self._head("chat.completion.chunk", turn), "choices": [choice]}

    def _head(self, kind: str, turn: Turn | None) -> dict[str, Any]:
        head: dict[str, Any] = {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
        }
        if turn is not None:
            # Which weights answered.
            head["system_fingerprint"] = f"version-{turn.versions[-1][0]}"
        return head

    def _logprobs(self, turn: Turn) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        content = []
        for token, logprob in zip(turn.tokens, turn.logprobs, strict=True):
            text = self.tokenizer.decode_all([token])
            content.append(
                {
                    "token": text,
                    "logprob": logprob,
                    "bytes": list(text.encode()),
                    "top_logprobs": [],
                }
            )
        return {"content": content, "refusal": None}


def error_event(body: dict[str, Any]) -> bytes:
    return _event(body)


def _event(data: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


def _usage(turn: Turn) -> dict[str, int]:
    return {
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": len(turn.tokens),
        "total_tokens": turn.prompt_tokens + len(turn.tokens),
    }
