"""Operations of a token, and the share of the devices' peak that a step takes."""

from types import SimpleNamespace

import pytest
import torch

from paceline.process.compute_device import peak_flops
from policy_worker import trainer as module
from policy_worker.step.stats import Stats
from policy_worker.trainer import Trainer
from tests.fixtures.configs import config_of
from tests.fixtures.policy_models import tiny_network
from tests.fixtures.training_steps import make_gradients


def size(model) -> int:
    return sum(p.numel() for p in model.parameters())


def test_a_trained_parameter_counts_six_a_frozen_one_four_and_an_asked_one_two():
    model, reference = tiny_network("qwen3"), tiny_network("qwen3")
    frozen = model.model.layers[0].requires_grad_(False)
    gradients = make_gradients(config_of(), model, frozen={"reference": reference})
    expected = 6 * size(model) - 2 * size(frozen) + 2 * size(reference)
    assert gradients.operations_a_token == expected


def test_experts_count_as_far_as_a_token_goes_to_them():
    model = tiny_network("qwen3_moe")
    experts = sum(size(layer.mlp.experts) for layer in model.model.layers)
    gradients = make_gradients(config_of(), model)
    assert gradients.operations_a_token == 6 * (size(model) - experts / 2)  # 2 of 4 experts


def test_mfu_is_the_share_of_all_devices_of_a_replica(monkeypatch):
    stats, replica = Stats(), SimpleNamespace(size=2)
    stats.add("row_tokens", 300.0, 1.0)
    stats.add("row_tokens", 200.0, 1.0)
    gradients = SimpleNamespace(operations_a_token=6e6)
    trainer = SimpleNamespace(device=None, gradients=gradients, replica=replica)
    monkeypatch.setattr(module, "peak_flops", lambda device: 1e9)
    assert Trainer.mfu(trainer, stats, 3.0) == pytest.approx(6e6 * 500 / (3.0 * 1e9 * 2))


def test_a_device_without_a_known_peak_has_no_mfu():
    assert peak_flops(torch.device("cpu")) is None
    assert Trainer.mfu(SimpleNamespace(device=torch.device("cpu")), Stats(), 1.0) is None


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA H100 PCIe MIG 1g.10gb", None),
        ("NVIDIA T4", None),
    ],
)
def test_each_form_of_a_device_has_its_own_peak(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda", 0)) == peak
