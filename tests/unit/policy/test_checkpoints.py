"""A checkpoint gives back exactly the state it was taken of, and leaves no litter."""

import os
import threading
from pathlib import Path

import pytest
import torch

from paceline.ids import Step
from paceline.observe.checkpoints import VOID, complete
from policy_worker.checkpoint import checkpoint as checkpoint_module
from policy_worker.checkpoint import shards as shards_module
from policy_worker.checkpoint.atomic_directory import locked_directory
from policy_worker.checkpoint.checkpoint import (
    META,
    Checkpointer,
    CheckpointError,
    read_meta,
)
from policy_worker.rows.replica import Replica
from tests.fixtures.train_states import (
    all_bits,
    assert_same_bits,
    synthetic_step,
    tiny_config,
    tiny_state,
)


@pytest.fixture
def config(tmp_path):
    return tiny_config(tmp_path)


@pytest.fixture
def checkpointer(tmp_path, config):
    checkpointer = Checkpointer(tmp_path / "run", config)
    yield checkpointer
    checkpointer.close()


@pytest.fixture
def slow_disk(monkeypatch):
    """Events: a write has begun, and it may go on."""
    begun, may_write = threading.Event(), threading.Event()
    write = checkpoint_module.write_shards

    def slow(*args):
        begun.set()
        assert may_write.wait(60)
        return write(*args)

    monkeypatch.setattr(checkpoint_module, "write_shards", slow)
    return begun, may_write


def test_training_goes_on_while_the_disk_is_slow_and_its_steps_are_those_after_a_restore(
    config, checkpointer, slow_disk
):
    state = tiny_state(config)
    torch.manual_seed(7)
    for _ in range(2):
        synthetic_step(state)
    before = all_bits(state)
    saved = checkpointer.save_async(state)
    checkpointer.before_change()
    torch.manual_seed(8)
    uninterrupted = [synthetic_step(state) for _ in range(3)]
    assert not saved.done()
    slow_disk[1].set()
    resumed = tiny_state(config)
    checkpointer.restore(resumed, saved.result(30).path)
    assert_same_bits(all_bits(resumed), before)
    torch.manual_seed(8)
    assert [synthetic_step(resumed) for _ in range(3)] == uninterrupted
    assert_same_bits(all_bits(resumed), all_bits(state))


def test_every_file_and_every_name_of_a_checkpoint_is_synced_before_it_counts(
    config, tmp_path, monkeypatch
):
    """A power cut takes back names that were not synced, although the bytes under them were."""
    synced: list[Path] = []
    sync = os.fsync

    def note(handle):
        synced.append(Path(f"/proc/self/fd/{handle}").readlink())
        sync(handle)

    monkeypatch.setattr(os, "fsync", note)
    checkpointer = Checkpointer(tmp_path / "new", config)
    path = checkpointer.save_async(tiny_state(config)).result(60).path
    checkpointer.close()
    unfinished = path.with_name(f".{path.name}")
    files = [unfinished / file.name for file in path.iterdir()]
    assert {file.suffix for file in files} == {".safetensors", ".json"}, "no pickle among them"
    assert len({file.stat().st_mode for file in path.iterdir()}) == 1, "whoever reads one reads all"
    assert set(files) <= set(synced[: synced.index(unfinished)])
    assert synced[-2:] == [unfinished, path.parent], "its names, and then its own"
    first = synced[: synced.index(files[0])]
    assert {tmp_path, tmp_path / "new"} <= set(first), "the names of the directories around it"


def test_a_write_whose_state_was_outvoted_leaves_no_checkpoint(config, checkpointer, slow_disk):
    state = tiny_state(config)
    synthetic_step(state)
    pending = checkpointer.save_async(state)
    checkpointer.abandon(state.version)
    slow_disk[1].set()
    with pytest.raises(CheckpointError, match="outvoted"):
        pending.result(60)
    assert complete(checkpointer._root.parent / "checkpoints") == []


def test_no_writer_can_overwrite_the_checkpoint_of_another(config, checkpointer, tmp_path):
    """An outvoted replica that was stopped wakes up after the good checkpoint of its step was
    recorded."""
    good = tiny_state(config)
    synthetic_step(good)
    recorded = checkpointer.save_async(good, "right").result(30).path
    before = (recorded / "meta.json").read_bytes()
    outvoted = Checkpointer(tmp_path / "run", config)
    diverged = tiny_state(config)
    torch.manual_seed(99)
    synthetic_step(diverged)
    late = outvoted.save_async(diverged, "wrong").result(30).path
    assert (recorded / "meta.json").read_bytes() == before
    outvoted.delete([late])  # the controller refuses it
    outvoted.close()
    assert not late.exists()
    assert read_meta(recorded)["weights_digest"] == "right"


def test_a_checkpoint_is_copied_to_the_memory_of_the_one_before(config, checkpointer):
    state, places = tiny_state(config), set()
    checkpointer.reserve(state)
    for _ in range(3):
        checkpointer.save_async(state).result(30)
        places.add(tuple(t.data_ptr() for t in checkpointer._newest.copies.result()))
    assert len(places) == 1


def test_same_step_on_a_later_line_lies_beside_the_earlier_one(config, checkpointer):
    state = tiny_state(config)
    synthetic_step(state)
    checkpointer.save_async(state).result(30)
    torch.manual_seed(99)
    synthetic_step(state)
    state.step, state.version = 1, 7
    path = checkpointer.save_async(state).result(30).path
    restored = tiny_state(config)
    assert checkpointer.restore(restored, path)["version"] == 7
    assert_same_bits(all_bits(restored), all_bits(state))
    assert len(list(path.parent.iterdir())) == 2


def test_failed_write_leaves_no_checkpoint_and_says_why(config, checkpointer, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("a file where the directory should be")
    with pytest.raises(OSError, match="checkpoints"):
        checkpointer.save_async(tiny_state(config)).result(30)
    assert complete(tmp_path / "run" / "checkpoints") == []
    assert checkpointer._copies._free, "the next try has the memory of this one"


def test_delete_removes_only_checkpoints_of_this_run(config, checkpointer, tmp_path):
    state = tiny_state(config)
    paths = []
    for _ in range(2):
        synthetic_step(state)
        paths.append(checkpointer.save_async(state).result(30).path)
    elsewhere = tmp_path / "precious" / "step-000001"
    elsewhere.mkdir(parents=True)
    checkpointer.delete([str(paths[0]), elsewhere, paths[0].parent, paths[0] / ".." / ".." / "x"])
    checkpointer.close()
    assert complete(tmp_path / "run" / "checkpoints") == [paths[1]]
    assert elsewhere.is_dir()


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda p: p.rename(p.with_name("gone")), "no such checkpoint"),
        (lambda p: (p / META).unlink(), "not a complete checkpoint"),
        (lambda p: (p / META).write_text("{"), "cannot be read"),
        (lambda p: (p / META).write_text("[" * 100_000), "cannot be read"),
        (lambda p: (p / META).write_text("[]"), "format of something else"),
        (lambda p: (p / VOID).touch(), "is void"),
        (lambda p: next(p.glob("shard-*")).unlink(), "is missing"),
        (lambda p: _flip_byte(next(p.glob("shard-*")), -1), "is damaged"),
        (lambda p: _cut(next(p.glob("shard-*"))), r"is damaged: shard-.* is \{"),
    ],
)
def test_unusable_checkpoint_is_refused_with_the_reason(config, checkpointer, harm, message):
    state = tiny_state(config)
    path = checkpointer.save_async(state).result(30).path
    harm(path)
    with pytest.raises(CheckpointError, match=message):
        checkpointer.restore(state, path)


def _flip_byte(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def _cut(path):
    path.write_bytes(path.read_bytes()[:-1])


class OneOfTwo(Replica):
    """Rank ``rank`` of two, which hold the whole state each; the checkpoint is of one rank.
    ``said``: the other one's problem."""

    def __init__(self, rank: int, said: str = "") -> None:
        super().__init__()
        self.rank, self.size, self._said = rank, 2, said

    def gather(self, value):
        return [value, self._said]


@pytest.fixture
def many_files(config, checkpointer, monkeypatch):
    """The path of a checkpoint in several files."""
    monkeypatch.setattr(shards_module, "FILE_BYTES", 1 << 10)
    path = checkpointer.save_async(tiny_state(config)).result(60).path
    assert len(read_meta(path)["files"]) > 4
    return path


def test_the_ranks_check_every_file_once(config, many_files, tmp_path, monkeypatch):
    checked: list[str] = []
    check = checkpoint_module.fingerprint

    def note(path, *args):
        checked.append(path.name)
        return check(path, *args)

    monkeypatch.setattr(checkpoint_module, "fingerprint", note)
    for rank in (0, 1):
        Checkpointer(tmp_path, config, OneOfTwo(rank)).restore(tiny_state(config), many_files)
    assert sorted(checked) == sorted(checkpoint_module.meta_of(many_files)["files"])


def test_damage_that_one_rank_finds_fails_the_restore_of_every_rank(config, many_files, tmp_path):
    state = tiny_state(config)
    replica = OneOfTwo(0, "shard 2 is damaged")
    with pytest.raises(CheckpointError, match="shard 2 is damaged"):
        Checkpointer(tmp_path, config, replica).restore(state, many_files)


def test_a_restore_reports_progress_while_it_checks_and_while_it_reads(
    config, many_files, tmp_path
):
    """It would be declared wedged otherwise: it may take longer than fleet.wedged_after_s."""
    progress: list[None] = []
    checkpointer = Checkpointer(tmp_path, config, on_progress=lambda: progress.append(None))
    checkpointer.restore(tiny_state(config), many_files)
    assert len(progress) >= 2 * (len(read_meta(many_files)["files"]) - 1)


# ---- sweeps: what nobody recorded is removed, and nothing that may still be needed


def directory(root: Path, name: str) -> Path:
    path = root / name
    path.mkdir(parents=True)
    (path / "meta.json").write_text("{}")
    return path


def test_what_dead_writers_left_is_removed_and_all_else_stays(config, tmp_path):
    root = tmp_path / "run" / "checkpoints"
    dead = [
        directory(root, "step-000001.0123456789ab-1"),
        directory(root, "step-000002.0123456789ab-2"),
        directory(root, ".step-000009.0123456789ab-3"),  # half-written, and locked by nobody
        directory(root, ".trash.step-000001.aa-1-0123456789ab"),
    ]
    recorded = directory(root, "step-000002.ba9876543210-1")
    begun = directory(root, "step-000002.0123456789ab-1")  # the run began with it
    held = directory(root, "step-000001.0123456789ab-7")  # finished, and locked by its writer
    stays = [
        recorded,
        begun,
        held,
        directory(root, "step-000005.0123456789ab-4"),  # its record may be under way
        directory(root, "step-000006.0123456789ab-5"),
        directory(root, "step-000001"),  # of an earlier release
        directory(root, "step-000001.mine"),  # a copy by hand
        directory(root, "notes"),
    ]
    (root / "step-000002").symlink_to(recorded.name)
    (root / "step-000003.0123456789ab-9").symlink_to(recorded.name)
    model = config.model.model_copy(update={"initial_checkpoint": str(begun)})
    checkpointer = Checkpointer(tmp_path / "run", config.model_copy(update={"model": model}))
    with locked_directory(held):
        checkpointer.sweep(Step(5), frozenset({recorded.name}))
        checkpointer.close()
        assert [path.name for path in dead if path.exists()] == []
        assert [path.name for path in stays if not path.exists()] == []
    assert (root / "step-000002").resolve() == recorded
    assert (root / "step-000003.0123456789ab-9").is_symlink()


def test_a_slow_writer_that_lives_finishes_its_checkpoint(
    config, checkpointer, tmp_path, slow_disk
):
    begun, may_write = slow_disk
    state = tiny_state(config)
    synthetic_step(state)
    writing = checkpointer.save_async(state)
    assert begun.wait(60)
    for settled in (100, 1):
        other = Checkpointer(tmp_path / "run", config)
        other.sweep(Step(settled), frozenset())
        other.close()
        may_write.set()
        path = writing.result(60).path
        # The second time it is complete, and its record is on its way: only a settled step says
        # that none will come.
        assert complete(tmp_path / "run" / "checkpoints") == [path]
