"""Uses of vLLM's private interface. Everything else goes through AsyncLLM's public methods. Tested
with the pinned version."""

import logging
import re
from collections.abc import Iterator
from copy import copy
from typing import Any


def prepared(llm: Any, prompt: Any, params: Any, tasks: Any, adapter: Any) -> Any:
    """A checked request for the engine, with this LoRARequest or None. It is the same for all
    completions of a group, and preparing it costs as much as several tokens of a small model."""
    return llm.input_processor.process_inputs(
        "", prompt, params, supported_tasks=tasks, lora_request=adapter
    )


def adapter_manager(model_runner: Any) -> Any:
    """A rank's LoRAModelManager."""
    return model_runner.lora_manager._adapter_manager


def quieten() -> None:
    """Hides the warning that a later vLLM will refuse prepared requests: it matters when the pinned
    version changes, not in a run's log."""
    logging.getLogger("vllm.v1.engine.async_llm").addFilter(
        lambda record: "EngineCoreRequest" not in record.getMessage()
    )


def another(request: Any, name: str, seed: int | None) -> Any:
    """A copy of the request, for generate()."""
    request = copy(request)
    request.request_id = name
    request.sampling_params = copy(request.sampling_params)
    request.sampling_params.seed = seed
    return request


def states(llm: Any) -> Iterator[Any]:
    """The front end's states of unfinished sequences."""
    return iter(list(llm.output_processor.request_states.values()))


def name_of(state: Any) -> str:
    """The request id passed to generate()."""
    return str(state.external_req_id)


def tokens_so_far(state: Any) -> int:
    return int(state.detokenizer.num_output_tokens())


def so_far(state: Any) -> Any:
    """An unfinished sequence as an aborted CompletionOutput."""
    from vllm.v1.engine import FinishReason

    return state._new_completion_output([], FinishReason.ABORT, None)


async def pause(llm: Any, mode: str) -> None:
    """AsyncLLM.pause_generation(mode, clear_cache=False) without its final sleep of 20 ms, which
    waits for outputs to reach their callers. That is not needed here."""
    await llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=False)


def was_killed(error: Exception) -> bool:
    """True if vLLM did not start because a signal ended its engine process. The message contains
    the exit statuses, such as {'EngineCore': -9}."""
    return bool(re.search(r"core proc\(s\): \{.*: -\d+", str(error)))


def is_dead(llm: Any) -> bool:
    return bool(llm.errored)
