"""Two hundred rebuilds in one process leave nothing behind."""

import gc
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from paceline.mesh.elastic_mesh import EpochCancelled, MeshError, ProcessMesh
from testbed.patience import Patience, patient
from testbed.redis.redis_process import throwaway_redis

CPU = torch.device("cpu")
WARM_UP = 60
REBUILDS = 200
ELEMENTS = 500_000


def test_rebuilds_grow_neither_threads_nor_descriptors_nor_memory(tmp_path: Path) -> None:
    me = psutil.Process()
    others = set(threading.enumerate())
    with throwaway_redis(tmp_path) as url:
        # Whatever needs a garbage collection would be dropped in any thread, at any time.
        gc.disable()
        try:
            for epoch in range(WARM_UP):
                rebuild(url, epoch)
            dropped(others)
            before = me.num_threads(), me.num_fds(), me.memory_info().rss
            peak_threads = 0
            for epoch in range(WARM_UP, WARM_UP + REBUILDS):
                rebuild(url, epoch)
                peak_threads = max(peak_threads, me.num_threads())
            dropped(others)
        finally:
            gc.enable()
        after = me.num_threads(), me.num_fds(), me.memory_info().rss
    assert after[0] <= before[0]
    assert after[1] <= before[1]
    # The buffers of 200 groups of two are 800 MB; the allocator's arenas settle only slowly.
    assert after[2] - before[2] < 100 << 20
    # Old groups (four threads each, two a rebuild) go while new ones come, not at the end.
    assert peak_threads < before[0] + 2 * REBUILDS


def rebuild(url: str, epoch: int) -> None:
    """Forms a mesh of two, reduces, then abandons it from one end with an operation running."""
    results: list[object] = []
    both = threading.Barrier(2)
    ends = [threading.Thread(target=member, args=(url, epoch, r, both, results)) for r in (0, 1)]
    for end in ends:
        end.start()
    for end in ends:
        end.join(timeout=patient(60))
    assert results == [3.0, 3.0]


def member(url: str, epoch: int, rank: int, both: threading.Barrier, results: list[object]) -> None:
    mesh = ProcessMesh.form(
        url=url, key=f"leak-{epoch}", rank=rank, size=2, device=CPU, cancelled=lambda: False
    )
    scratch = torch.full((ELEMENTS,), float(rank + 1))
    mesh.all_reduce(scratch)
    results.append(scratch[-1].item())
    # Who abandons too early spoils the other's all-reduce.
    both.wait(timeout=patient(60))
    if rank == 0:
        assert fails(MeshError, lambda: mesh.all_reduce(scratch))
    else:
        pending = mesh.recv_async(scratch, 0)
        mesh.abandon()
        assert fails(EpochCancelled, lambda: mesh.wait(pending))


def fails(kind: type[Exception], operation: Callable[[], None]) -> bool:
    """As pytest.raises, but keeps no traceback, and with it no buffer, in a reference cycle."""
    try:
        operation()
    except kind:
        return True
    return False


def dropped(others: set[threading.Thread]) -> None:
    """Waits until no thread of an abandoned group is left. ``others``: those of earlier tests."""
    patience = Patience(60)
    while any(t.name.startswith("mesh-") for t in set(threading.enumerate()) - others):
        assert patience.left()
        threading.Event().wait(0.05)
