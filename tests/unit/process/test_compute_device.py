"""The device that a process computes on and its precision, on machines with and without GPUs."""

import os
from typing import Any

import pytest
import torch

from paceline.config.sections.inputs import ModelConfig
from paceline.errors import BadInput
from paceline.process import compute_device
from paceline.process.compute_device import compute_dtype, pick_device
from paceline.rpc.addresses import LOOPBACK


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Two GPUs, and what torch was told of them."""
    seen: dict[str, Any] = {"current": 0}
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "device_count", lambda: 2)
    monkeypatch.setattr(cuda, "current_device", lambda: seen["current"])
    monkeypatch.setattr(cuda, "set_device", lambda device: seen.update(current=device))
    monkeypatch.setattr(
        torch.backends.cuda, "enable_cudnn_sdp", lambda on: seen.update(cudnn_attention=on)
    )
    monkeypatch.setattr(
        torch._C, "_accelerator_setAllocatorSettings", lambda to: seen.update(allocator=to)
    )
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    for name in ("ASYNC_ERROR_HANDLING", "ENABLE_MONITORING", "DUMP_ON_TIMEOUT", "PROPAGATE_ERROR"):
        monkeypatch.setenv(f"TORCH_NCCL_{name}", "1")
    return seen


@pytest.mark.parametrize("desired", ["auto", "cuda"])
@pytest.mark.parametrize(("number", "index"), [(None, 0), (1, 1), (5, 0)])
def test_a_cuda_device_has_an_index(
    gpus: dict[str, Any], desired: str, number: int | None, index: int
) -> None:
    assert pick_device(desired, number, "127.0.0.1") == torch.device("cuda", index)
    assert os.environ["NCCL_SOCKET_IFNAME"] == f"={LOOPBACK}"
    assert gpus["current"] == index
    assert gpus["cudnn_attention"] is False
    assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "0"
    assert "pinned_max_round" in gpus.pop("allocator")
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "backend:native"
    pick_device(desired, number)
    assert "allocator" not in gpus, "a user's own settings stay"


def test_the_cpu_is_taken_if_it_is_asked_for(gpus: dict[str, Any]) -> None:
    assert pick_device("cpu", 1) == torch.device("cpu")
    assert gpus == {"current": 0}


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_what_a_user_told_glibc_stays(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("ctypes.CDLL", lambda library: asked.append(library))
    pick_device("cpu")
    monkeypatch.setenv(name, "1")
    pick_device("cpu")
    assert asked == [None], "the first time alone"


def test_cuda_is_refused_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BadInput, match="no CUDA device"):
        pick_device("cuda")
    assert pick_device("auto").type == "cpu"


@pytest.mark.parametrize(
    ("model", "chosen", "device", "dtype"),
    [
        ("auto", "auto", "cuda", "bfloat16"),
        ("auto", "auto", "cpu", "float32"),
        ("float32", "auto", "cuda", "float32"),
        ("float32", "bfloat16", "cpu", "bfloat16"),
    ],
)
def test_precision(model: str, chosen: str, device: str, dtype: str) -> None:
    assert compute_dtype(ModelConfig(path="m", dtype=model), device, chosen) == dtype  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "device", "path", "wanted"),
    [
        ({}, "cpu", None, ("sdpa", False)),
        ({}, "cuda", None, ("flex", True)),
        ({"dtype": "float32"}, "cuda", None, ("sdpa", True)),
        ({}, "cuda", "/nowhere", ("sdpa", True)),  # flex has to be compiled
        ({"attention": "sdpa", "compile": False}, "cuda", None, ("sdpa", False)),
    ],
)
def test_defaults_of_attention_and_compilation(
    monkeypatch: pytest.MonkeyPatch,
    model: dict[str, Any],
    device: str,
    path: str | None,
    wanted: tuple[str, bool],
) -> None:
    monkeypatch.setattr(compute_device, "device_type", lambda _: device)
    monkeypatch.delenv("CC", raising=False)
    if path:
        monkeypatch.setenv("PATH", path)
    given = ModelConfig(path="m", **model)
    assert (compute_device.attention_of(given), compute_device.compiles(given)) == wanted
