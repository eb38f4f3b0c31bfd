"""An engine whose model is a function from the prompt's text to what it says next.

And a character tokenizer with a chat template, so that every token can be read.
"""

from __future__ import annotations

import asyncio
import string
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from torch import Tensor
from transformers import AutoTokenizer

from rollout_worker.engine.base import (
    Aborted,
    Completion,
    Engine,
    EngineStats,
    Finish,
    Request,
)
from rollout_worker.tokenizer import PromptTokenizer
from testbed.tiny_model import make_tiny_model

VOCAB = "\n" + string.printable[:95]
END = 2
PLAIN = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}[{{ m.role }}]"
    "{{ m.content.split('|')[-1] | trim if m.role == 'assistant' else m.content }}<eos>\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""Leaves out what the model thought before '|', as templates of reasoning models do."""

TOOLS = (
    "{% if tools %}[tools]{{ tools | tojson }}<eos>\n{% endif %}"
    "{% for m in messages %}[{{ m.role }}{{ ' ' + m.name if m.role == 'tool' }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<eos>\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""Takes tools, as Qwen's does."""


def make_chat_model(path: Path, template: str | None = PLAIN, *, hidden: int = 32) -> Path:
    """A tiny random model that knows every printable character, with a chat template."""
    make_tiny_model(path, vocab=VOCAB, hidden=hidden)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    return path


Speaker = Callable[[str], str]


class TalkingEngine(Engine):
    """``speaker``: the prompt's text, special tokens included, to the answer. The answer ends with
    the end-of-sequence token unless it is cut by max_tokens or a stop string first.

    Token i of an answer has the log-probability -(i + 1) / 100. Between ``hold`` and
    ``release`` requests wait.
    """

    def __init__(self, speaker: Speaker, *, context: int = 400) -> None:
        self.speaker = speaker
        self.context = context
        self.tokenizer: PromptTokenizer
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.on_answer: Callable[[Request], None] = lambda request: None
        self._released = asyncio.Event()
        self._released.set()
        self._running: dict[str, asyncio.Future[None]] = {}
        self._version = -1

    def hold(self) -> None:
        self._released.clear()

    def release(self) -> None:
        self._released.set()

    @property
    def running(self) -> set[str]:
        return set(self._running)

    async def start(self) -> None: ...

    async def generate(self, request: Request) -> tuple[Completion, ...]:
        self.check(request)
        self.requests.append(request)
        cut: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._running[request.request_id] = cut
        released = asyncio.ensure_future(self._released.wait())
        try:
            await asyncio.wait({released, cut}, return_when=asyncio.FIRST_COMPLETED)
            if cut.done():
                raise Aborted(request.request_id)
        except asyncio.CancelledError:
            self.aborted.append(request.request_id)
            raise
        finally:
            released.cancel()
            del self._running[request.request_id]
        self.on_answer(request)
        return tuple(self._answer(request) for _ in range(request.count))

    def _answer(self, request: Request) -> Completion:
        text = self.speaker(self.tokenizer.decode_all(request.prompt_tokens.tolist()))
        finish, stop = Finish.STOP, None
        found = [(text.find(s) + len(s), s) for s in request.params.stop if s in text]
        tokens = self.tokenizer.encode(text)
        if found:
            at, stop = min(found)
            tokens = self.tokenizer.encode(text[:at])
        else:
            tokens.append(END)
        if len(tokens) > request.params.max_tokens:
            tokens, finish, stop = tokens[: request.params.max_tokens], Finish.LENGTH, None
        n = len(tokens)
        return Completion(
            np.array(tokens, np.int32),
            -np.arange(1, n + 1, dtype=np.float32) / 100,
            ((self._version, n),),
            finish,
            stop,
        )

    def abort(self, request_id: str) -> None:
        if (cut := self._running.get(request_id)) is not None and not cut.done():
            self.aborted.append(request_id)
            cut.set_result(None)

    def abort_all(self) -> None:
        for request_id in list(self._running):
            self.abort(request_id)

    async def load_weights(self, version: int, tensors: Mapping[str, Tensor]) -> float:
        self._version = version
        return 0.0

    @property
    def version(self) -> int:
        return self._version

    @property
    def vocabulary(self) -> int:
        return len(VOCAB) + 3

    @property
    def max_context(self) -> int:
        return self.context

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self._running))

    async def close(self) -> None: ...
