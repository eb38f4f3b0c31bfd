"""A sweep removes the directories that nobody recorded, and nothing that may still be needed."""

import threading
from pathlib import Path

import pytest

from paceline.ids import Step
from paceline.observe.checkpoint_links import complete
from policy_worker.checkpoint import checkpoint as checkpoint_module
from policy_worker.checkpoint.atomic_directory import locked_directory
from policy_worker.checkpoint.checkpoint import Checkpointer
from tests.fixtures.train_states import synthetic_step, tiny_config, tiny_state


@pytest.fixture
def config(tmp_path):
    return tiny_config(tmp_path)


@pytest.fixture
def checkpointer(tmp_path, config):
    checkpointer = Checkpointer(tmp_path / "run", config)
    yield checkpointer
    checkpointer.close()


def directory(root: Path, name: str) -> Path:
    path = root / name
    path.mkdir(parents=True)
    (path / "meta.json").write_text("{}")
    return path


def test_what_dead_writers_left_is_removed_and_all_else_stays(checkpointer, tmp_path):
    root = tmp_path / "run" / "checkpoints"
    dead = [
        directory(root, "step-000001.0123456789ab-1"),
        directory(root, "step-000002.0123456789ab-2"),
        directory(root, ".step-000009.0123456789ab-3"),  # half-written, and locked by nobody
        directory(root, ".trash.step-000001.aa-1-0123456789ab"),
    ]
    recorded = directory(root, "step-000002.ba9876543210-1")
    stays = [
        recorded,
        directory(root, "step-000005.0123456789ab-4"),  # its record may be under way
        directory(root, "step-000006.0123456789ab-5"),
        directory(root, "step-000001"),  # of an earlier release
        directory(root, "step-000001.mine"),  # a copy by hand
        directory(root, "notes"),
    ]
    (root / "step-000002").symlink_to(recorded.name)
    (root / "step-000003.0123456789ab-9").symlink_to(recorded.name)
    checkpointer.sweep(Step(5), frozenset({recorded.name}))
    checkpointer.close()
    assert [path.name for path in dead if path.exists()] == []
    assert [path.name for path in stays if not path.exists()] == []
    assert (root / "step-000002").resolve() == recorded
    assert (root / "step-000003.0123456789ab-9").is_symlink()


def test_the_checkpoint_that_a_run_began_with_is_never_swept(config, tmp_path):
    root = tmp_path / "run" / "checkpoints"
    given = directory(tmp_path / "other" / "checkpoints", "step-000001.0123456789ab-1")
    inside = directory(root, "step-000002.0123456789ab-1")
    begun = config.model_copy(
        update={"model": config.model.model_copy(update={"initial_checkpoint": str(inside)})}
    )
    checkpointer = Checkpointer(tmp_path / "run", begun)
    checkpointer.sweep(Step(100), frozenset())
    checkpointer.close()
    assert given.is_dir() and inside.is_dir()


def test_a_slow_writer_that_lives_finishes_its_checkpoint(
    config, checkpointer, tmp_path, monkeypatch
):
    writes = checkpoint_module.write_shards
    begun, go_on = threading.Event(), threading.Event()

    def slow(*args):
        begun.set()
        assert go_on.wait(60)
        return writes(*args)

    monkeypatch.setattr(checkpoint_module, "write_shards", slow)
    state = tiny_state(config)
    synthetic_step(state)
    writing = checkpointer.save_async(state)
    assert begun.wait(60)
    other = Checkpointer(tmp_path / "run", config)
    other.sweep(Step(100), frozenset())
    other.close()
    go_on.set()
    path = writing.result(60).path
    assert complete(tmp_path / "run" / "checkpoints") == [path]
    # It is complete now, and its record is on its way: only a settled step says that none will
    # come.
    other = Checkpointer(tmp_path / "run", config)
    other.sweep(Step(1), frozenset())
    other.close()
    assert path.is_dir()


def test_a_sweep_leaves_a_finished_directory_that_its_writer_still_holds(checkpointer, tmp_path):
    root = tmp_path / "run" / "checkpoints"
    path = directory(root, "step-000001.0123456789ab-1")
    with locked_directory(path):
        checkpointer.sweep(Step(5), frozenset())
        checkpointer.close()
        assert path.is_dir()
