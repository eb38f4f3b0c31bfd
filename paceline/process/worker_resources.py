"""Resource use of a worker: memory of its processes, and GPUs if it has any."""

import sys
import time
from typing import Any

import psutil

REFRESH_S = 2.0  # reports are more frequent, and reading all child processes costs milliseconds


class Resources:
    """Gauges of this process, its children and the GPUs it may use."""

    def __init__(self, torch: Any = None) -> None:
        """``torch``: a replacement for the imported module."""
        self._process = psutil.Process()
        self._torch = torch
        self._read_at = -REFRESH_S
        self._last: dict[str, float] = {}

    def read(self) -> dict[str, float]:
        """rss_bytes (this process) and memory_bytes (with its children; shared pages count in
        each). On CUDA also gpu_memory_bytes (used on the visible devices, by any process) and, if
        NVML is installed, gpu_utilization (mean of the devices, 0 to 1)."""
        now = time.monotonic()
        if now - self._read_at >= REFRESH_S:
            self._read_at = now
            self._last = {**self._memory(), **self._gpu()}
        return self._last

    def _memory(self) -> dict[str, float]:
        own = total = self._process.memory_info().rss
        for child in self._process.children(recursive=True):
            try:
                total += child.memory_info().rss
            except psutil.Error:
                continue  # it has ended
        return {"rss_bytes": float(own), "memory_bytes": float(total)}

    def _gpu(self) -> dict[str, float]:
        torch = self._torch or sys.modules.get("torch")
        if torch is None or not torch.cuda.is_available():
            return {}
        found: dict[str, float] = {}
        devices = range(torch.cuda.device_count())
        try:
            # NVML needs no CUDA context and also sees an engine in a child process.
            found["gpu_memory_bytes"] = float(
                sum(torch.cuda.device_memory_used(device) for device in devices)
            )
            busy = [torch.cuda.utilization(device) for device in devices]
            found["gpu_utilization"] = sum(busy) / len(busy) / 100
        except Exception:  # a missing NVML package and a missing driver raise different errors
            if "gpu_memory_bytes" not in found and torch.cuda.is_initialized():
                free, total = torch.cuda.mem_get_info()
                found["gpu_memory_bytes"] = float(total - free)
        return found
