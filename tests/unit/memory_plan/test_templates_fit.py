"""Every template of `paceline init` on the GPUs that its summary names."""

import tomllib

import pytest
from transformers import AutoConfig

from paceline.config.schema import Config
from paceline.config.template import ALGORITHMS, SIZES, template
from paceline.memory_plan import Gpu, memory_plan, named_gpu, problems
from paceline.model_shape import shape_of
from tests.unit.memory_plan.test_memory_plan import QWEN3_06B, QWEN3_32B, QWEN25_7B, QWEN25_72B

MODELS = {
    "small": ("qwen3", QWEN3_06B),
    "7b": ("qwen2", QWEN25_7B),
    "32b": ("qwen3", QWEN3_32B),
    "70b": ("qwen2", QWEN25_72B),
}
"""Numbers of the models that templates name on the hub; tiny trains an example of 0.1 M parameters.
"""
TOO_LARGE = {("32b", "ppo"), ("70b", "ppo")}
"""Policy and critic of these sizes need GPUs of 141 GB."""


@pytest.fixture(scope="module")
def shapes():
    return {
        size: shape_of(AutoConfig.for_model(family, **numbers), "bfloat16")
        for size, (family, numbers) in MODELS.items()
    }


def test_every_size_with_a_hub_model_is_covered():
    assert set(MODELS) == set(SIZES) - {"tiny"}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size", MODELS)
def test_template_fits_the_gpus_that_it_names(size, algorithm, shapes):
    config = Config.model_validate(
        tomllib.loads(template(size=size, algorithm=algorithm, out="run.toml"))
    )
    assert "80 GB" in SIZES[size]["summary"]
    gpu = named_gpu("h100-80g")
    if size == "small" and not config.recorded:  # vLLM takes its share of the same GPU
        left = 1 - config.rollout.vllm["gpu_memory_utilization"]
        gpu = Gpu(gpu.name, int(gpu.bytes * left))
    plans = memory_plan(config, shapes[size])
    if (size, algorithm) in TOO_LARGE:
        assert list(problems(plans, gpu))
        gpu = named_gpu("h200-141g")
    assert not list(problems(plans, gpu))
