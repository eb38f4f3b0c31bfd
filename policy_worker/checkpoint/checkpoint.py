"""Checkpoints of a policy replica, each of which is complete or absent.

    copying thread   copies of this rank's slices in host memory ───────────┐
    writer threads   slices ► .step-000123.<writer>/shard-*.safetensors ◄───┘  (every rank, fsync)
                     rank 0: all ranks done ► slices cover every tensor ► meta.json ► fsync
                             ► rename to step-000123.<writer> ► fsync of the parent

- A directory named ``step-…`` with a ``meta.json`` is complete. At whatever instant the process
  dies, the complete checkpoints are the old ones, or the old ones and the new one.
- <writer> is random and is never used twice, so no replica, however late, can overwrite what
  another wrote. The ledger records the directory. The leader then links step-000123 to it.
- Nothing in it can run code: tensors are safetensors, the rest is JSON. The files' headers describe
  the slices of each rank, so a checkpoint of any number of ranks loads into any other number, and
  ranks exchange no plan.
- A writer holds a lock on its unfinished directory. The next writer removes an unfinished directory
  that nobody has locked. After each record it also removes what was finished and never recorded
  (litter.py).
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from paceline.config.load import fleet_digest
from paceline.config.model_files import weights_fingerprint
from paceline.config.schema import Config
from paceline.errors import UserError
from paceline.ids import Step, Version
from paceline.observe.checkpoints import (
    META,
    VOID,
    complete,
    is_checkpoint_name,
    unlink,
)
from paceline.process.files import make_directory, sync_directory, write_durably
from paceline.process.structured_log import event
from paceline.process.waits import WaitKind, waiting
from policy_worker.checkpoint.atomic_directory import (
    fingerprint,
    locked_directory,
    remove_unfinished,
    unrecorded,
)
from policy_worker.checkpoint.shards import (
    WEIGHTS,
    StateSlices,
    first_gap,
    named_tensors,
    read_shards,
    stored_tensors,
    weights_of_part,
    write_shards,
)
from policy_worker.model.host_memory import HostCopies
from policy_worker.model.train_state import TrainState
from policy_worker.objectives.load import load_objective
from policy_worker.ranks.rank_group import FOREVER
from policy_worker.rows.replica import Replica

log = logging.getLogger(__name__)
FORMAT = 1
HOST = torch.device("cpu")


class CheckpointError(UserError):
    """A checkpoint is missing, incomplete, damaged or of another model; the message says which."""


@dataclass(frozen=True)
class CheckpointInfo:
    path: Path
    step: Step
    version: Version
    size_bytes: int
    seconds: float
    digest: str = ""
    """Digest of the weights, as in votes."""


class Checkpointer:
    """Writes and reads the checkpoints under ``<run_dir>/checkpoints``. One per process. With a
    replica of several ranks every rank has one, and calls ``save_async`` and ``restore`` at the
    same points of the command sequence."""

    def __init__(
        self,
        run_dir: Path,
        config: Config,
        replica: Replica | None = None,
        device: torch.device = HOST,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """``on_progress`` is called while a state is read."""
        self._on_progress = on_progress
        self._root = run_dir.absolute() / "checkpoints"
        self._config = config
        self._replica = replica or Replica()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._copies = HostCopies(device)
        self._saves = 0
        self._newest: _Job | None = None

    def save_async(
        self,
        state: TrainState,
        digest: str = "",
        source: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> Future[CheckpointInfo]:
        """Copies the state and writes it in the background. ``digest``: of its weights, as in
        votes. ``source``: the memory that a tensor's bits are in.

        Returns at once: call ``before_change`` before the state is changed.

        The future of rank 0 is done when the checkpoint is complete and durable; that of another
        rank when its own part is. It raises what the write failed with; no checkpoint appears then.
        """
        begun = time.monotonic()
        self._saves += 1
        writer = f"{self._replica.identity}-{self._saves}"
        plain = (int, float, bool, str, list, tuple, type(None))
        groups = [
            {k: v for k, v in group.items() if k != "params" and isinstance(v, plain)}
            for group in state.optimizer.param_groups
        ]
        slices = StateSlices.of(state, self._replica.rank)
        job = _Job(
            step=state.step,
            version=state.version,
            writer=writer,
            path=self._root / f"step-{state.step:06d}.{writer}",
            slices=slices,
            copies=self._copies.take([*map(source, slices.tensors.values())]),
            groups=groups,
            digest=digest,
            begun=begun,
        )
        self._newest = job
        return self._writer.submit(self._write, job)

    def reserve(self, state: TrainState) -> None:
        """Has the memory of a checkpoint ready when the first one is due. Returns at once."""
        self._copies.reserve([*StateSlices.of(state, self._replica.rank).tensors.values()])

    def before_change(self) -> None:
        """Blocks until the copies under way are complete: the state may be changed then."""
        self._copies.before_change()

    def let_go(self) -> None:
        """Frees the host memory that no checkpoint is being written from."""
        self._copies.let_go()

    def abandon(self, version: Version) -> None:
        """A write of ``version`` or a later one that is under way leaves no checkpoint, and its
        future raises: the state was wrong."""
        if self._newest is not None and self._newest.version >= version:
            self._newest.abandoned.set()

    def restore(
        self, state: TrainState, path: str | Path, *, version: Version | None = None
    ) -> dict[str, Any]:
        """Loads ``path`` into ``state`` (parameters, optimizer, numbers, step), bit for bit.
        ``version``: the controller's number for this state now; default: its number when written.
        Returns the checkpoint's meta data. Raises CheckpointError, on every rank if it does on one;
        the state is unusable then."""
        path = Path(path)
        targets = {name: tensor for name, tensor in named_tensors(state) if tensor.numel()}
        meta = self._checked_meta(path)
        self._refuse_other_base(path, meta)
        if strange := sorted(targets.keys() ^ stored_tensors(path).keys()):
            where = "checkpoint" if strange[0] in targets else "model"
            raise CheckpointError(
                f"{path} is of another model: {strange[0]} is not in the {where} "
                f"(names that differ: {len(strange)})"
            )
        self._read(path, targets, f"{path} is of another model")
        saved = meta["optimizer"]["groups"]
        for group, scalars in zip(state.optimizer.param_groups, saved, strict=True):
            group.update({k: scalars[k] for k in ("lr", "initial_lr") if k in scalars})
        state.step = Step(meta["step"])
        state.version = Version(meta["version"]) if version is None else version
        event(log, "restored", step=state.step, version=state.version, path=path)
        return meta

    def begin_with(self, state: TrainState, path: str | Path) -> None:
        """Loads the weights of another run's checkpoint, and its optimizer state if that fits.
        Parts that only one of the runs has are left as they are, or out. Step and version stay
        those of a new run. The files are checked as by ``restore``. Raises CheckpointError."""
        path = Path(path)
        targets = {name: tensor for name, tensor in named_tensors(state) if tensor.numel()}
        meta = self._checked_meta(path)
        self._refuse_other_base(path, meta)
        ours, theirs = self._config.model.lora, meta.get("lora")
        if ours is not None and theirs and ours.alpha != theirs["alpha"]:
            raise CheckpointError(
                f"model.initial_checkpoint: adapters of {path} have alpha {theirs['alpha']:g}, and "
                f"model.lora.alpha is {ours.alpha:g}: set it to theirs"
            )
        stored = stored_tensors(path).keys()
        whole = targets.keys() == stored
        differs = f"model.initial_checkpoint: {path} is of another model than model.path"
        for part in state.parts:
            name = "" if part == state.main else part
            here, there = (weights_of_part(names, name).keys() for names in (targets, stored))
            if (strange := sorted(here ^ there)) and (there or not name):
                more = f"(names that differ: {len(strange)})"
                raise CheckpointError(f"{differs}: {strange[0]} is in only one of them {more}")
        if not whole:
            targets = {n: t for n, t in targets.items() if n in stored and n.startswith(WEIGHTS)}
        self._read(path, targets, differs)
        event(log, "began with a checkpoint", path=path, of_step=meta["step"], optimizer=whole)

    def _refuse_other_base(self, path: Path, meta: Mapping[str, Any]) -> None:
        """Adapters of another base are of its shapes. Checkpoints of before name no digest."""
        mine = self._bases if meta.get("lora") else {}
        for part in meta.get("parts", ()):
            here, there = mine.get(part["name"]), part.get("base")
            if here and there and here != there:
                raise CheckpointError(
                    f"{path} has adapters of {part['name']} for another base than this run's, "
                    f"whose weights differ: set its model.path to {part['path']} as it was then"
                )

    @cached_property
    def _bases(self) -> dict[str, str]:
        """Fingerprint of the base of each part; none without adapters."""
        parts = load_objective(self._config).trains if self._config.model.lora else ()
        path = self._config.model.path
        return {part.name: weights_fingerprint(part.path or path) for part in parts}

    def _read(self, path: Path, targets: dict[str, Tensor], differs: str) -> None:
        try:
            read_shards(path, targets, self._on_progress)
        except ValueError as error:
            raise CheckpointError(f"{differs}: {error}") from error

    def _checked_meta(self, path: Path) -> dict[str, Any]:
        """meta.json. The ranks share the check of the files: 96 GB (8B parameters) are read once
        for it, and not by each of 8."""
        problem, meta = "", dict[str, Any]()
        try:
            meta = meta_of(path)
            mine = sorted(meta["files"])[self._replica.rank :: self._replica.size]
            check_files(path, meta, mine, self._on_progress)
        except CheckpointError as error:
            problem = str(error)
        if found := next(filter(None, self._replica.gather(problem)), ""):
            raise CheckpointError(found)
        return meta

    def delete(self, paths: Iterable[str | Path]) -> None:
        """Removes checkpoints in the background. Ignores what is not a checkpoint of this run."""
        chosen = [Path(p) for p in paths]
        try:
            self._writer.submit(self._delete, chosen)
        except RuntimeError:  # closed: the controller's answer to the last checkpoint comes late
            self._delete(chosen)

    def sweep(self, settled: Step, recorded: Collection[str]) -> None:
        """Removes in the background what dead writers left: directories of steps before ``settled``
        whose names are not ``recorded``, and unfinished ones."""
        with contextlib.suppress(RuntimeError):  # closed: a later sweep finds them
            self._writer.submit(self._sweep, settled, recorded)

    def close(self) -> None:
        """Waits for the writes under way."""
        self._writer.shutdown()
        self._copies.close()

    # -- writer thread ------------------------------------------------------------------------

    def _write(self, job: _Job) -> CheckpointInfo:
        partial = job.path.with_name(f".{job.path.name}")
        try:
            with waiting(WaitKind.CHECKPOINT, f"writing checkpoint {job.path}", str(job.path)):
                if self._replica.leads:
                    files = self._write_and_complete(job, partial)
                else:
                    self._await_message(job, 0)
                    files = self._write_mine(job, partial)
                    self._send(job, {"files": files})
        except BaseException as error:
            self._send(job, {"error": str(error)})
            event(log, "checkpoint failed", logging.ERROR, step=job.step, error=error)
            raise
        finally:
            if job.copies.exception() is None:
                self._copies.give_back(job.copies.result())
        size, seconds = sum(f["size"] for f in files.values()), time.monotonic() - job.begun
        if self._replica.leads:
            event(log, "checkpoint", step=job.step, version=job.version, bytes=size, s=seconds)
        return CheckpointInfo(job.path, job.step, job.version, size, seconds, job.digest)

    def _write_and_complete(self, job: _Job, partial: Path) -> dict[str, Any]:
        make_directory(self._root)
        remove_unfinished(self._root)
        with locked_directory(partial):
            try:
                self._send(job, {})  # the directory is there
                files = self._write_mine(job, partial)
                for rank in range(1, self._replica.size):
                    files |= self._await_message(job, rank)["files"]
                if gap := first_gap(partial, job.slices.shapes):
                    raise CheckpointError(f"the ranks' slices do not make up {gap}")
                write_durably(partial / META, json.dumps(self._meta(job, files), indent=1))
                sync_directory(partial)
                if job.abandoned.is_set():
                    raise CheckpointError(f"version {job.version} was outvoted or never committed")
                partial.rename(job.path)
                sync_directory(self._root)
                return files
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise

    def _write_mine(self, job: _Job, partial: Path) -> dict[str, Any]:
        return write_shards(job.slices, job.copies.result(), partial, self._replica.rank)

    def _meta(self, job: _Job, files: dict[str, Any]) -> dict[str, Any]:
        model = self._config.model
        return {
            "format": FORMAT,
            "step": job.step,
            "version": job.version,
            "weights_digest": job.digest,
            "ranks": self._replica.size,
            "config_digest": fleet_digest(self._config)[0],
            "model": {"path": model.path, "tokenizer": model.tokenizer},
            "lora": None if model.lora is None else model.lora.model_dump(mode="json"),
            "parts": [
                {
                    "name": part.name,
                    "head": part.head,
                    "path": part.path or model.path,
                    "base": self._bases.get(part.name, ""),
                }
                for part in load_objective(self._config).trains
            ],
            "optimizer": {"groups": job.groups},
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "files": files,
            "written_at": time.time(),
        }

    def _delete(self, paths: list[Path]) -> None:
        for path in paths:
            if path.absolute().parent != self._root or not is_checkpoint_name(path.name):
                event(log, "not a checkpoint of this run, kept", logging.WARNING, path=path)
                continue
            trash = self._root / f".trash.{path.name}-{self._replica.identity}"
            unlink(path)
            try:
                path.rename(trash)  # half a removal must not look like a checkpoint
                shutil.rmtree(trash)
            except FileNotFoundError:
                continue
            except OSError as error:
                event(log, "cannot remove checkpoint", logging.WARNING, path=path, error=error)

    def _sweep(self, settled: Step, recorded: Collection[str]) -> None:
        try:
            remove_unfinished(self._root)
            in_use = self._config.model.initial_checkpoint
            found = unrecorded(self._root, settled, recorded, in_use)
        except OSError as error:
            fields = {"path": self._root, "error": error}
            event(log, "cannot sweep the checkpoints", logging.WARNING, **fields)
            return
        for path in found:
            event(log, "removes a checkpoint that was never recorded", logging.WARNING, path=path)
        self._delete(found)

    # -- between the ranks' writer threads: one key a rank in the replica's store ---------------

    def _send(self, job: _Job, message: dict[str, Any]) -> None:
        if self._replica.store is not None:
            key = f"checkpoint/{job.writer}/{self._replica.rank}"
            self._replica.store.clone().set(key, json.dumps(message))

    def _await_message(self, job: _Job, rank: int) -> dict[str, Any]:
        assert self._replica.store is not None
        # A clone has its own connection: a blocking get would hold up every other user of it.
        store = self._replica.store.clone()
        store.set_timeout(FOREVER)
        message: dict[str, Any] = json.loads(store.get(f"checkpoint/{job.writer}/{rank}"))
        if "error" in message:
            raise CheckpointError(f"rank {rank} could not write: {message['error']}")
        return message


@dataclass(frozen=True)
class _Job:
    step: Step
    version: Version
    writer: str
    path: Path
    slices: StateSlices
    copies: Future[list[Tensor]]
    groups: list[dict[str, Any]]
    digest: str
    begun: float
    abandoned: threading.Event = field(default_factory=threading.Event)
    """Set if the checkpoint must not appear any more."""


def read_meta(path: Path) -> dict[str, Any]:
    """``meta.json`` of a complete checkpoint. Raises CheckpointError with the reason, also if a
    file is missing or its bytes are not those written."""
    meta = meta_of(path)
    check_files(path, meta, meta["files"])
    return meta


def meta_of(path: Path) -> dict[str, Any]:
    """``meta.json``, before its files are checked. Raises CheckpointError."""
    if not path.is_dir():
        others = complete(path.absolute().parent)
        hint = f"; the newest beside it is {others[-1]}" if others else ""
        raise CheckpointError(f"{path}: no such checkpoint directory{hint}")
    if (path / VOID).exists():
        raise CheckpointError(f"{path} is void: the other replicas' weights differed: use another")
    try:
        meta: dict[str, Any] = json.loads((path / META).read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is not a complete checkpoint: it has no {META}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path / META} cannot be read: {error}") from None
    found = meta.get("format") if isinstance(meta, dict) else "of something else"
    if found != FORMAT:
        raise CheckpointError(f"{path} has format {found}, this version reads {FORMAT}")
    for name in meta["files"]:
        if Path(name).name != name:
            raise CheckpointError(f"{path / META} names {name!r}, which is not a file beside it")
    return meta


def check_files(
    path: Path,
    meta: Mapping[str, Any],
    names: Iterable[str],
    on_progress: Callable[[], None] = lambda: None,
) -> None:
    """Compares these files with ``meta``. Raises CheckpointError for the first that differs."""
    for name in names:
        wanted = meta["files"][name]
        try:
            found = fingerprint(path / name, on_progress)
        except FileNotFoundError:
            raise CheckpointError(f"{path} is damaged: {name} is missing") from None
        if found != wanted:
            raise CheckpointError(f"{path} is damaged: {name} is {found}, was written as {wanted}")
