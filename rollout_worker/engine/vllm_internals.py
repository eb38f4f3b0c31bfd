"""The few things of vLLM that this project needs and that are not part of its public interface.

Tested with the pinned version; everything else goes through AsyncLLM's public methods.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def states(llm: Any) -> Iterator[Any]:
    """The unfinished sequences as the front end knows them."""
    return iter(list(llm.output_processor.request_states.values()))


def name_of(state: Any) -> str:
    """The request id that was given to generate()."""
    return str(state.external_req_id)


def tokens_so_far(state: Any) -> int:
    return int(state.detokenizer.num_output_tokens())


async def pause(llm: Any, mode: str) -> None:
    """As AsyncLLM.pause_generation(mode, clear_cache=False), which sleeps for another 20 ms once
    the engine stands still, to let outputs reach their callers. Nothing here needs that."""
    await llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=False)


def is_dead(llm: Any) -> bool:
    return bool(llm.errored)
