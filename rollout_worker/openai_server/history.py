"""What a request adds to a sample's transcript.

A client sends the whole conversation every time. It has to begin with what is recorded, message by
message; only what follows is new. The tokens of past turns are never made anew from their text, so
the model's own turns are recognised by their text, or by the text and the calls of tools that it was
told as, blanks and ids aside, and stand as sampled.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.dataset.rows import Message
from rollout_worker.openai_server.api_errors import ApiError
from rollout_worker.openai_server.tools import calls_in, same_calls

DIVERGED = "conversation_diverged"


def added(recorded: Sequence[Message] | None, sent: Sequence[Message]) -> list[Message]:
    """The messages that are new. Raises Refusal where ``sent`` does not extend ``recorded``.

    A sample is one sequence of tokens: a conversation that was rewritten, or another one beside
    it, cannot be part of it.
    """
    if recorded is None:
        raise _diverged("part of this sample was not said in messages")
    for at, (old, new) in enumerate(zip(recorded, sent, strict=False)):
        if not _same(old, new):
            raise _diverged(
                f"messages[{at}] is not what was said there before; a sample is one conversation "
                "that only grows"
            )
    if len(sent) <= len(recorded):
        raise _diverged(
            f"{len(sent)} messages after a conversation of {len(recorded)}; a turn cannot be "
            "sampled again"
        )
    return list(sent[len(recorded) :])


def repeats(recorded: Sequence[Message] | None, sent: Sequence[Message]) -> bool:
    """Whether ``sent`` is the request that the newest turn was the answer to."""
    if not recorded or len(sent) != len(recorded) - 1:
        return False
    return all(_same(old, new) for old, new in zip(recorded, sent, strict=False))


def _same(old: Message, new: Message) -> bool:
    if old["role"] != new["role"]:
        return False
    if old["role"] == "assistant":
        text, told = str(old["content"]), str(new["content"]).strip()
        if "tool_calls" not in new or "tool_calls" in old:
            return text.strip() == told and old.get("tool_calls") == new.get("tool_calls")
        rest, calls = calls_in(text)
        return rest.strip() == told and same_calls(calls, new["tool_calls"])
    return dict(old) == dict(new)


def _diverged(why: str) -> ApiError:
    return ApiError(400, why, DIVERGED, "messages")
