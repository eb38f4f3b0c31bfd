"""GPUs that this process may use, without importing torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "CUDA_VISIBLE_DEVICES"
_DEVICES = Path("/dev")


def gpus_for(device: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Those that workers with ``model.device`` compute on."""
    return () if device == "cpu" else visible_gpus(environ)


def visible_gpus(environ: Mapping[str, str], devices: Path = _DEVICES) -> tuple[str, ...]:
    """Names of the GPUs, as CUDA_VISIBLE_DEVICES takes them; empty if there is none.

    ``devices``: directory of the device files. A container has those of its own GPUs alone.
    """
    if VARIABLE in environ:
        named = [part.strip() for part in environ[VARIABLE].split(",")]
        # CUDA ignores what comes after a number that is no device.
        valid = named[: next((at for at, one in enumerate(named) if one in ("", "-1")), len(named))]
        return tuple(valid)
    found = [path.name for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    # CUDA counts the devices that it sees from 0, whatever their files are called.
    return tuple(str(number) for number in range(len(found)))
