"""Compute device of a policy, rollout or scorer process, and the precision that goes with it."""

import contextlib
import ctypes
import os
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.config.sections.inputs import ModelConfig
from paceline.errors import BadInput
from paceline.rpc.addresses import interface_of

_NCCL_ENVIRONMENT = {
    # torch's watchdog and its monitor end the process when a peer dies: the mesh outlives it.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
}
_USERS_OWN = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"}

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "B200": 2250e12}
PEAK_FLOPS |= {"H100 PCIe": 756e12, "H100 NVL": 835e12, "H200 NVL": 835e12}
"""Dense bfloat16 operations per second of NVIDIA's data sheets, by a part of the device's name."""


def peak_flops(device: torch.device) -> float | None:
    """Operations per second of the data sheet; None if this device has none here, or is a part of
    one."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    if "MIG" in name:
        return None
    known = max((part for part in PEAK_FLOPS if part in name), key=len, default="")
    return PEAK_FLOPS.get(known)


def device_type(desired: str) -> str:
    """``cuda`` or ``cpu``, by ``model.device``. It makes no CUDA context. Raises BadInput."""
    available = torch.cuda.is_available()
    if desired == "cuda" and not available:
        raise BadInput("model.device = 'cuda', but torch finds no CUDA device: use 'auto' or 'cpu'")
    return "cuda" if available and desired != "cpu" else "cpu"


def pick_device(desired: str, number: int | None = None, host: str = "") -> torch.device:
    """The device of ``model.device``; a CUDA device has an index, and becomes the current one.
    ``number``: index of the CUDA device if there are so many, as of a rank on its host; default:
    the current one. ``host``: as for set_up_cuda. Raises BadInput."""
    if device_type(desired) == "cpu":
        _keep_freed_memory()
        return torch.device("cpu")
    set_up_cuda(host)
    # Set before anything makes a context: it would be on the first GPU, of every process.
    if number is not None and number < torch.cuda.device_count():
        torch.cuda.set_device(number)
    return torch.device("cuda", torch.cuda.current_device())


def _keep_freed_memory() -> None:
    """Keeps up to 1 GiB of what torch frees in the process (glibc). By default glibc gives it back
    and faults it in again, some thousand pages a step: 6 % of a small step's time."""
    if os.environ.keys() & _USERS_OWN:
        return
    trim_threshold, mmap_threshold = -1, -3
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(trim_threshold, 1 << 30)
        libc.mallopt(mmap_threshold, 32 << 20)  # the most that glibc takes


def give_back_freed(device: torch.device) -> None:
    """Gives what torch has freed, and keeps for later, back to the device, or of a CPU to the
    system (glibc)."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def set_up_cuda(host: str = "") -> None:
    """Makes torch's settings for CUDA. NCCL's are read when the process makes its first group, be
    it of the ranks of a replica. ``host``: this process's address for others, if it has one."""
    os.environ.update(_NCCL_ENVIRONMENT)
    if host and (interface := interface_of(host)):
        # NCCL takes any interface that it finds, such as a container bridge's.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    # cuDNN's attention makes a plan for every new shape, 400 ms each on an H200, and rows have new
    # shapes nearly every time. The flash kernel has no plans.
    torch.backends.cuda.enable_cudnn_sdp(False)
    # Page-locked memory is rounded up to a power of two otherwise. Some versions of torch cannot.
    if not os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:
        with contextlib.suppress(AttributeError, RuntimeError, ValueError):
            torch._C._accelerator_setAllocatorSettings("pinned_max_round_threshold_mb:1")


@contextlib.contextmanager
def stream_of_its_own(device: torch.device) -> Iterator[None]:
    """Puts what this thread does on a CUDA ``device`` beside what others do there. A thread begins
    on the first GPU and on the stream that trains: a copy to the host would wait for all that is
    queued there."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_device(device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        yield


def to_device(arrays: Sequence[np.ndarray[Any, Any]], device: torch.device) -> list[Tensor]:
    """The arrays, of one type, as tensors on ``device``: one copy, which the host does not wait
    for. From memory that is not page-locked it would wait for all that is queued there."""
    flat = torch.cat([torch.from_numpy(array.reshape(-1)) for array in arrays])
    if device.type == "cuda":
        flat = flat.pin_memory()
    parts = flat.to(device, non_blocking=True).split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def compiles(model: ModelConfig) -> bool:
    """True if the trainer's models are compiled: ``model.compile``, which is on with CUDA."""
    if isinstance(model.compile, bool):
        return model.compile
    return device_type(model.device) == "cuda"


def attention_of(model: ModelConfig) -> str:
    """sdpa or flex: ``model.attention``, by default what was fastest on an H200."""
    if model.attention != "auto":
        return model.attention
    device = device_type(model.device)
    fits = device == "cuda" and compute_dtype(model, device) == "bfloat16"
    return "flex" if fits and c_compiler() else "sdpa"


def c_compiler() -> str | None:
    """The C compiler that Triton would find."""
    return os.environ.get("CC") or next(
        filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None
    )


def compute_dtype(model: ModelConfig, device: str, chosen: str = "auto") -> str:
    """The precision to compute in, float32 or bfloat16. ``device``: cuda or cpu. ``chosen``: a
    setting of the role's own, which goes before ``model.dtype``. If both are auto: bfloat16 on
    CUDA, where float32 selects the slowest attention and doubles memory, and float32 on the CPU."""
    name = model.dtype if chosen == "auto" else chosen
    if name == "auto":
        return "bfloat16" if device == "cuda" else "float32"
    return name
