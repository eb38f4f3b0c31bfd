"""Judge behind an OpenAI-compatible URL: one chat completion for each completion that is scored.

The server's own faults (it does not answer, it is overloaded) are nobody's: the rollout worker asks
again. A request that it refuses, and replies without a score, fail the attempt.
"""

import asyncio
import json
import os
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np

from paceline.config.schema import Config
from paceline.config.sections.scorers import ScorerConfig
from paceline.errors import UserError
from paceline.process.threads import all_or_none
from paceline.user_code import asked
from scorer_worker.scorer import (
    BadCompletion,
    CompletionScorer,
    Item,
    NoScore,
    Score,
    ScorerError,
    Unavailable,
)


def score_in(reply: str, config: ScorerConfig) -> float:
    """The first group of the last match. Raises NoScore."""
    found = list(re.finditer(config.pattern, reply))
    shown = repr(reply[-SHOWN:])
    if not found or found[-1][1] is None:
        raise NoScore(f"the judge's reply has no score (pattern {config.pattern!r}): {shown}")
    try:
        score = float(found[-1][1])
    except ValueError:
        raise NoScore(f"the judge's score {found[-1][1]!r} is no number: {shown}") from None
    low, high = config.score_range
    if not low <= score <= high:
        raise NoScore(f"the judge's score {score:g} is not from {low:g} to {high:g}: {shown}")
    return score


KEY_VARIABLE = "PACELINE_JUDGE_KEY"
OVERLOADED = (408, 425, 429)
REDIRECTS = range(300, 400)
MOST_BYTES = 4 << 20
"""Upper bound for one reply."""


class UrlJudge(CompletionScorer):
    def __init__(self, config: Config, name: str) -> None:
        """Raises ScorerError if the key cannot be read."""
        self._scorer = config.scorers.by_name[name]
        self._url = f"{str(self._scorer.url).rstrip('/')}/chat/completions"
        self._key = _key(name, self._scorer.api_key_file)
        self._threads = ThreadPoolExecutor(self._scorer.batch_size, "judge")

    async def score(self, items: Sequence[Item]) -> list[Score]:
        loop = asyncio.get_running_loop()
        # If one fails, those that have not begun are not asked for any more.
        return await all_or_none(
            loop.run_in_executor(self._threads, self._score, item) for item in items
        )

    def _score(self, item: Item) -> float:
        """In a thread. Raises NoScore after the last attempt, or Unavailable."""
        for left in reversed(range(self._scorer.attempts)):
            reply = self._ask(
                self._scorer.prompt.format(
                    prompt=item.prompt, completion=item.text, answer=item.answer
                )
            )
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
            if error.code >= 500 or error.code in OVERLOADED:
                raise Unavailable(said) from None
            if error.code in REDIRECTS:
                said += ": redirects are not followed; set the URL of the server itself"
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


def _content(answer: bytes) -> str:
    """Text of the first choice. Raises NoScore."""
    try:
        found: Any = json.loads(answer)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError):
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
            f"scorers.{name}.api_key_file {path} cannot be read ({error.strerror}): create it, or "
            f"set {KEY_VARIABLE}"
        ) from error


def main() -> int:
    """Asks for one score. Standard input: {"name": ..., "settings": ...}. The exit status is 0 if
    the judge gave one; else 1, with one line on standard error."""
    given = asked()
    name, settings = given["name"], given["settings"]
    config = Config.model_validate(
        {"model": {"path": "m"}, "data": {"path": "d"}, "scorers": {name: settings}}
    )
    token = np.zeros(1, np.int32)
    item = Item(token, token, prompt="What is 2 + 2?", text="4", answer="4")
    try:
        asyncio.run(UrlJudge(config, name).score([item]))
    except (UserError, BadCompletion, NoScore, Unavailable) as error:
        print(f"check: scorers.{name}: {error}".splitlines()[0], file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
