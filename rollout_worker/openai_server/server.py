"""Socket and lifetime of the OpenAI endpoint, and the samples it serves."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from typing import TYPE_CHECKING

from paceline.config.schema import Config
from paceline.process.structured_log import event
from paceline.prompt_tokenizer import PromptTokenizer
from rollout_worker.environments.base import BadEnvironment, Endpoint
from rollout_worker.environments.conversation import Conversation

if TYPE_CHECKING:
    from paceline.rpc.http_server import Http

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
_BACKLOG = 512
_STOP_S = 1.0


class ChatServer:
    """Serves on loopback. A sample's key is 144 random bits; other callers are refused."""

    def __init__(self, config: Config, tokenizer: PromptTokenizer) -> None:
        """Raises BadEnvironment if the tokenizer has no chat template."""
        if not tokenizer.has_template:
            raise BadEnvironment("rollout.openai needs a tokenizer with a chat template")
        self._rollout = config.rollout
        self._model = config.model.path
        self._served: dict[str, Conversation] = {}
        self._server: Http | None = None
        self._task: asyncio.Task[None] | None = None
        self.url = ""

    async def start(self) -> None:
        """Raises BadEnvironment if the port is taken."""
        try:
            # It reuses addresses, so that a restarted worker gets its port again.
            bound = socket.create_server((HOST, self._rollout.openai_port), backlog=_BACKLOG)
        except OSError as error:
            raise BadEnvironment(
                f"rollout.openai_port = {self._rollout.openai_port}: {error.strerror}; 0 takes a "
                "free port"
            ) from error
        bound.setblocking(False)
        self.url = f"http://{HOST}:{bound.getsockname()[1]}/v1"
        self._server = await asyncio.to_thread(self._make)
        self._task = asyncio.create_task(self._serve(self._server, bound), name="openai")
        event(logger, "openai endpoint", url=self.url, model=self._model)

    async def close(self) -> None:
        for conversation in self._served.values():
            conversation.close()
        self._served.clear()
        if self._server is not None:
            self._server.should_exit = True
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=_STOP_S)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    # ---- samples

    def endpoint(self) -> Endpoint:
        """For one sample, with its own key. ``admit`` starts serving it."""
        key = secrets.token_urlsafe(18)
        headers = {"X-Paceline-Sample": key}
        return Endpoint(base_url=self.url, api_key=key, headers=headers, model=self._model)

    def admit(self, endpoint: Endpoint, conversation: Conversation) -> None:
        self._served[endpoint.api_key] = conversation

    def dismiss(self, endpoint: Endpoint) -> None:
        self._served.pop(endpoint.api_key, None)

    # ---- the web framework

    def _make(self) -> Http:
        from paceline.rpc.http_server import http_server
        from rollout_worker.openai_server.app import ChatApp

        as_asked = self._rollout.openai_sampling == "request"
        app = ChatApp(self._served.get, self._model, as_asked).app()
        # One connection for each sample, and other settings bound the samples.
        return http_server(app, most_connections=None)

    async def _serve(self, server: Http, bound: socket.socket) -> None:
        try:
            await server.serve(sockets=[bound])
        except Exception:
            # Agents then get connection errors, and their groups fail.
            logger.exception("openai endpoint failed")
        finally:
            bound.close()
