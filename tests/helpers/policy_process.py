"""A real policy worker process that dies at a chosen instant and leaves its last weights behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

_server = multiprocessing.get_context("forkserver")
# Torch and transformers are imported once, in the server that workers are forked from.
_server.set_forkserver_preload(["policy_worker.main"])


def start(config: Any, address: str, worker_id: str, out: Path, **faults: Any) -> Any:
    """A running worker process. ``faults``: see _worker."""
    process = _server.Process(
        target=_worker, args=(config.model_dump(mode="json"), address, worker_id, str(out), faults)
    )
    process.start()
    return process


def _worker(
    config: dict[str, Any], address: str, worker_id: str, out: str, faults: dict[str, Any]
) -> None:
    """``die_in_reduce``: SIGKILL itself with the n-th all-reduce under way. ``stop_in_reduce``:
    SIGSTOP there. ``falls_at``: SIGKILL itself at that instant (benchmarks/instants.py) of step
    ``step``, or the first time it seeds a joiner. Exits with the worker's status."""
    import torch

    from paceline import log
    from paceline.config.schema import Config
    from paceline.mesh import ProcessMesh
    from policy_worker.main import PolicyWorker

    torch.set_num_threads(1)
    sink = os.open(Path(out, f"{worker_id}.{os.getpid()}.log"), os.O_WRONLY | os.O_CREAT)
    os.dup2(sink, 2)
    log.setup(worker_id)
    count = 0
    whole = ProcessMesh.all_reduce_async

    def all_reduce_async(self: Any, buffer: Any) -> Any:
        nonlocal count
        count += 1
        handle = whole(self, buffer)
        if count == faults.get("die_in_reduce"):
            os.kill(os.getpid(), signal.SIGKILL)
        if count == faults.get("stop_in_reduce"):
            os.kill(os.getpid(), signal.SIGSTOP)
        return handle

    ProcessMesh.all_reduce_async = all_reduce_async  # type: ignore[method-assign]
    if "falls_at" in faults:
        _set_trap(PolicyWorker, Path(out), **faults)
    worker = PolicyWorker(Config.model_validate(config), [address], worker_id)
    worker.run()
    state = worker.trainer.state
    weights = {name: tensor.clone() for name, tensor in state.named_weights()}
    save_file(weights, Path(out, f"{worker_id}.safetensors"), {"version": str(state.version)})
    os._exit(0)


def _set_trap(worker_class: Any, out: Path, falls_at: str, step: int = 0) -> None:
    from benchmarks.instants import Trap

    trap = Trap(out, falls_at, signal.SIGKILL)
    if falls_at == "seed":
        trap.set()
        return
    next_plan = worker_class.next_plan

    def at_step(self: Any, epoch: int) -> Any:
        if self.trainer.state.step == step - 1:
            worker_class.next_plan = next_plan
            trap.set()
        return worker_class.next_plan(self, epoch)

    worker_class.next_plan = at_step
