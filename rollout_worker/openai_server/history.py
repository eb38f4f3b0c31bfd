"""Comparison of a client's conversation with a sample's transcript.

A client sends the whole conversation with each request. It has to begin with the recorded messages;
the rest is new. Past turns are never tokenised again: the model's own turns are recognised by their
text, or by their text and tool calls (surrounding blanks and ids are ignored), and stay as sampled.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.dataset.rows import Message
from rollout_worker.openai_server.api_errors import ApiError
from rollout_worker.openai_server.tools import calls_in, same_calls

DIVERGED = "conversation_diverged"


def added(recorded: Sequence[Message] | None, sent: Sequence[Message]) -> list[Message]:
    """The new messages. Raises ApiError if ``sent`` does not extend ``recorded``.

    A sample is one sequence of tokens: it cannot contain a conversation that was rewritten, nor a
    second conversation.
    """
    if recorded is None:
        raise _diverged("part of this sample was not made of messages")
    for at, (old, new) in enumerate(zip(recorded, sent, strict=False)):
        if not _same(old, new):
            raise _diverged(
                f"messages[{at}] differs from the recorded message; a sample is one conversation "
                "that only grows"
            )
    if len(sent) <= len(recorded):
        raise _diverged(
            f"{len(sent)} messages after a conversation of {len(recorded)}; a turn cannot be "
            "sampled again"
        )
    return list(sent[len(recorded) :])


def repeats(recorded: Sequence[Message] | None, sent: Sequence[Message]) -> bool:
    """True if the newest turn answered the request ``sent``."""
    if not recorded or len(sent) != len(recorded) - 1:
        return False
    return all(_same(old, new) for old, new in zip(recorded, sent, strict=False))


def _same(old: Message, new: Message) -> bool:
    if old["role"] != new["role"] or old["role"] != "assistant":
        return dict(old) == dict(new)
    text, sent = str(old["content"]), str(new["content"]).strip()
    if "tool_calls" not in new or "tool_calls" in old:
        return text.strip() == sent and old.get("tool_calls") == new.get("tool_calls")
    rest, calls = calls_in(text)
    return rest.strip() == sent and same_calls(calls, new["tool_calls"])


def _diverged(why: str) -> ApiError:
    return ApiError(400, why, DIVERGED, "messages")
