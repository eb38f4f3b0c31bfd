"""A mixture of experts in vLLM: new weights reach the experts, too."""

from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.prompt_tokenizer import PromptTokenizer
from rollout_worker.engine import make_engine
from rollout_worker.engine.base import Request, SamplingParams
from testbed.tiny_model import make_tiny_model
from tests.fixtures.engines import Reference, needs_vllm, tiny_config

PROMPT = [13, 4, 5, 6, 7, 14]


@needs_vllm
@pytest.mark.long
async def test_experts_compute_with_the_weights_of_each_swap(tmp_path: Path) -> None:
    """A CPU kernel packs the experts' weights when they are loaded first."""
    torch.set_num_threads(1)
    paths = [make_tiny_model(tmp_path / str(s), hidden=128, seed=s, experts=4) for s in (0, 1)]
    config = tiny_config(paths[0], max_tokens=64, engine="vllm", vllm={"block_size": 32})
    engine = make_engine(config, PromptTokenizer(config))
    await engine.start()
    try:
        first, second = map(Reference, paths)
        for version, model in enumerate((first, second, first)):
            await engine.load_weights(version, dict(model.model.named_parameters()))
            request = Request(
                f"v{version}", np.array(PROMPT, np.int32), SamplingParams(max_tokens=12), 2
            )
            for sample in await engine.generate(request):
                expected = model.logprobs(PROMPT, sample)
                np.testing.assert_allclose(sample.logprobs, expected, atol=1e-4)
    finally:
        await engine.close()
