"""Memory and GPU use of a worker and its child processes."""

from __future__ import annotations

import sys
import time
from typing import Any

import psutil

EVERY_S = 2.0
"""Reading all child processes takes milliseconds; reports are more frequent."""


class Resources:
    """Gauges of this process, of its children, and of the GPUs it may use."""

    def __init__(self, torch: Any = None) -> None:
        """``torch``: the module; default: the imported one."""
        self._process = psutil.Process()
        self._torch = torch
        self._read_at = -EVERY_S
        self._last: dict[str, float] = {}

    def read(self) -> dict[str, float]:
        """rss_bytes (this process), memory_bytes (with its children; shared pages count in each),
        and on CUDA gpu_memory_bytes (used by all processes on the visible devices) and
        gpu_utilization (mean, 0 to 1; only if NVML answers)."""
        now = time.monotonic()
        if now - self._read_at >= EVERY_S:
            self._read_at = now
            self._last = {**self._memory(), **self._gpu()}
        return self._last

    def _memory(self) -> dict[str, float]:
        own = total = self._process.memory_info().rss
        for child in self._process.children(recursive=True):
            try:
                total += child.memory_info().rss
            except psutil.Error:
                continue  # ended meanwhile
        return {"rss_bytes": float(own), "memory_bytes": float(total)}

    def _gpu(self) -> dict[str, float]:
        torch = self._torch or sys.modules.get("torch")
        if torch is None or not torch.cuda.is_available():
            return {}
        found: dict[str, float] = {}
        devices = range(torch.cuda.device_count())
        try:
            # By NVML, which makes no CUDA context: an engine in a child process is seen too.
            found["gpu_memory_bytes"] = float(
                sum(torch.cuda.device_memory_used(device) for device in devices)
            )
            busy = [torch.cuda.utilization(device) for device in devices]
            found["gpu_utilization"] = sum(busy) / len(busy) / 100
        except Exception:  # NVML's package or driver is not there: each says so in its own way
            if "gpu_memory_bytes" not in found and torch.cuda.is_initialized():
                free, total = torch.cuda.mem_get_info()
                found["gpu_memory_bytes"] = float(total - free)
        return found
