"""Uses of vLLM's private interface. Everything else goes through AsyncLLM's public methods. Tested
with the pinned version."""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from typing import Any

import torch


def prepared(llm: Any, prompt: Any, params: Any, tasks: Any, adapter: Any) -> Any:
    """A checked request for the engine, with this LoRARequest or None. It is the same for all
    completions of a group, and preparing it costs as much as several tokens of a small model."""
    return llm.input_processor.process_inputs(
        "", prompt, params, supported_tasks=tasks, lora_request=adapter
    )


def takes_adapters(architectures: Sequence[str] | None) -> bool:
    """vLLM's model of that name has slots for adapters. Its wrapper of transformers' models has."""
    from vllm.model_executor.models import ModelRegistry, supports_lora

    known = [ModelRegistry.models[n] for n in architectures or () if n in ModelRegistry.models]
    try:
        return not known or supports_lora(known[0].load_model_cls())
    except Exception:  # vLLM's own start says what it cannot import
        return True


def adapter_manager(model_runner: Any) -> Any:
    """A rank's LoRAModelManager."""
    return model_runner.lora_manager._adapter_manager


def is_scheduled(model_runner: Any, state: Any) -> bool:
    """The request of that ``state`` was in the newest step, and holds its slots."""
    return state.req_id in model_runner.input_batch.req_id_to_index


def cache_slots(model_runner: Any) -> int:
    """Tokens of the key-value cache of a CPU's rank. Raises ValueError if it has several caches."""
    groups = model_runner.kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise ValueError(
            "rollout.router_replay needs a GPU for a model with layers of several kinds"
        )
    return int(model_runner.kv_cache_config.num_blocks * groups[0].kv_cache_spec.block_size)


def slots_of_step() -> Any:
    """The slot of each token of the forward that runs, as a tensor; None: it is a trial."""
    from vllm.forward_context import get_forward_context

    slots = get_forward_context().slot_mapping
    return next(iter(slots.values())) if slots else None


def slots_of(model_runner: Any, state: Any) -> Any:
    """The slots of a request's tokens, in order, and what is left of the last block."""
    size = model_runner.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
    blocks = torch.tensor(state.block_ids[0], dtype=torch.int64)
    return (blocks[:, None] * size + torch.arange(size)).flatten()


def before_requests_end(model_runner: Any, call: Callable[[str, Any], None]) -> None:
    """Has ``call`` called with the id and the state of each request that a CPU's rank forgets,
    before its slots are written again."""
    removed = model_runner._on_request_state_removed

    def forget(request_id: str, state: Any) -> None:
        if state is not None:
            call(request_id, state)
        removed(request_id, state)

    model_runner._on_request_state_removed = forget


def request_named(name: str, ids: Iterable[str]) -> str:
    """The id of the request that was passed to generate() as ``name``; empty if it has none."""
    return next((each for each in ids if name in (each, each.rpartition("-")[0])), "")


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
