"""What workers say of their memory and GPUs."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from paceline.process import worker_resources
from paceline.process.worker_resources import Resources


def test_memory_of_children_counts_and_they_may_end_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_resources, "REFRESH_S", 0.0)
    found = Resources(torch=SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False)))
    alone = found.read()
    assert alone["memory_bytes"] >= alone["rss_bytes"] > 1e6
    hold = "import sys; kept = bytearray(b'x' * 30_000_000); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None and child.stdout.readline()
        both = found.read()
        assert both["memory_bytes"] > alone["memory_bytes"] + 25e6
    assert found.read()["memory_bytes"] < both["memory_bytes"] - 25e6
    assert set(alone) == {"rss_bytes", "memory_bytes"}


class Cuda:
    """Two devices; ``nvml`` says whether NVML's package is there."""

    def __init__(self, *, nvml: bool, initialized: bool = True) -> None:
        self._nvml, self._initialized = nvml, initialized

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return self._initialized

    def device_count(self) -> int:
        return 2

    def device_memory_used(self, device: int) -> int:
        if not self._nvml:
            raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")
        return 10 + device

    def utilization(self, device: int) -> int:
        return (20, 60)[device]

    def mem_get_info(self) -> tuple[int, int]:
        return 30, 100


@pytest.mark.parametrize(
    ("cuda", "gauges"),
    [
        (Cuda(nvml=True), {"gpu_memory_bytes": 21.0, "gpu_utilization": 0.4}),
        (Cuda(nvml=False), {"gpu_memory_bytes": 70.0}),
        # Asking CUDA itself would make a context in a process that computes nothing.
        (Cuda(nvml=False, initialized=False), {}),
    ],
)
def test_gpus_are_told_as_far_as_they_can_be_asked(cuda: Cuda, gauges: dict[str, float]) -> None:
    found = Resources(torch=SimpleNamespace(cuda=cuda)).read()
    assert {k: v for k, v in found.items() if k.startswith("gpu")} == gauges
