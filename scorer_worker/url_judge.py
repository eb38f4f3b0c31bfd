"""Judge behind an OpenAI-compatible URL: one chat completion for each completion that is scored.

The server's own faults (it does not answer, it is overloaded) are nobody's: the rollout worker asks
again. A request that it refuses, and replies without a score, fail the attempt.
"""

from __future__ import annotations

import asyncio
import json
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from typing import Any

from paceline.config.schema import Config
from scorer_worker.judge_reply import request_about, score_in
from scorer_worker.scorer import CompletionScorer, Item, NoScore, Score, ScorerError, Unavailable

KEY_VARIABLE = "PACELINE_JUDGE_KEY"
OVERLOADED = (408, 425, 429)
REDIRECTS = range(300, 400)
MOST_BYTES = 4 << 20
"""Of a reply."""


class UrlJudge(CompletionScorer):
    def __init__(self, config: Config, name: str) -> None:
        """Raises ScorerError if the key cannot be read."""
        self._scorer = config.scorers.by_name[name]
        self._url = f"{str(self._scorer.url).rstrip('/')}/chat/completions"
        self._key = _key(name, self._scorer.api_key_file)
        self._threads = ThreadPoolExecutor(self._scorer.batch_size, "judge")

    async def score(self, items: Sequence[Item]) -> list[Score]:
        loop = asyncio.get_running_loop()
        calls = [loop.run_in_executor(self._threads, self._of, item) for item in items]
        try:
            return list(await asyncio.gather(*calls))
        finally:
            # Those that have not begun are not asked for any more.
            for call in calls:
                call.cancel()

    def _of(self, item: Item) -> float:
        """In a thread. Raises NoScore after the last attempt, or Unavailable."""
        for left in reversed(range(self._scorer.attempts)):
            reply = self._ask(request_about(item, self._scorer))
            self.done += 1
            try:
                return score_in(reply, self._scorer)
            except NoScore as error:
                if not left:
                    raise NoScore(f"{error} ({self._scorer.attempts} replies)") from None
        raise AssertionError("attempts is at least 1")

    def _ask(self, text: str) -> str:
        body = {
            "model": self._scorer.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": self._scorer.max_tokens,
            "temperature": self._scorer.temperature,
        }
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(self._url, json.dumps(body).encode(), headers)
        try:
            with _WITHOUT_REDIRECTS.open(request, timeout=self._scorer.timeout_s) as answer:
                return _content(answer.read(MOST_BYTES))
        except urllib.error.HTTPError as error:
            said = f"{self._url} answers {error.code}: {error.read(SHOWN).decode(errors='replace')}"
            if error.code in REDIRECTS:
                raise NoScore(
                    f"{said}: redirects are not followed; set the URL of the server itself"
                ) from None
            if error.code >= 500 or error.code in OVERLOADED:
                raise Unavailable(said) from None
            raise NoScore(said) from None
        except (OSError, HTTPException) as error:
            raise Unavailable(f"{self._url} does not answer: {error}") from None

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would take the key to another server."""

    def redirect_request(self, *_: Any) -> None:
        return None


_WITHOUT_REDIRECTS = urllib.request.build_opener(_NoRedirects)
SHOWN = 300
"""Bytes of a refusal in an error."""


def _content(answer: bytes) -> str:
    """Text of the first choice. Raises NoScore."""
    try:
        found: Any = json.loads(answer)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError):
        found = None
    if not isinstance(found, str):
        shown = answer[:SHOWN].decode(errors="replace")
        raise NoScore(f"the judge's server answered no chat completion: {shown}")
    return found


def _key(name: str, path: str | None) -> str:
    if key := os.environ.get(KEY_VARIABLE, "").strip():
        return key
    if path is None:
        return ""
    try:
        return Path(path).read_text().strip()
    except OSError as error:
        raise ScorerError(
            f"scorers.{name}.api_key_file {path} cannot be read ({error.strerror}): create it, or set {KEY_VARIABLE}"
        ) from error
