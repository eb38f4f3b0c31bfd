"""Arguments: everything of vLLM is reachable, and what is wrong is named."""

from pathlib import Path

import pytest

from paceline.prompt_tokenizer import PromptTokenizer
from rollout_worker.engine import make_engine
from rollout_worker.engine.base import EngineError
from testbed.tiny_model import make_tiny_model
from tests.fixtures.engines import needs_vllm, tiny_config


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden=128)


async def _start(model: Path, **rollout) -> None:
    config = tiny_config(model, engine="vllm", **rollout)
    engine = make_engine(config, PromptTokenizer(config))
    try:
        await engine.start()
    finally:
        await engine.close()


@needs_vllm
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"enforce_eagre": True},
            "enforce_eagre is not an engine argument",
        ),
        ({"nonsense": 1}, "rollout.vllm.nonsense is not an engine argument"),
        ({"max_num_seqs": 4}, "set by rollout.max_sequences"),
        ({"logprobs_mode": "raw_logprobs"}, "cannot be changed"),
        ({"gpu_memory_utilization": 7}, "gpu_memory_utilization"),
    ],
)
async def test_a_wrong_argument_is_named_before_anything_starts(
    model: Path, given: dict[str, object], message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        await _start(model, vllm=given)


def test_other_engines_refuse_what_only_vllm_can(model: Path) -> None:
    for rollout in ({"on_update": "drain"}, {"on_update": "recompute"}, {"tensor_parallel": 2}):
        config = tiny_config(model, **rollout)
        with pytest.raises(EngineError, match="vllm"):
            make_engine(config, PromptTokenizer(config))
