"""Checkpoint links: they follow the record, and lead to nothing that was voided or deleted."""

from pathlib import Path

from paceline.observe.checkpoints import complete, unlink
from paceline.observe.projection import Projection
from paceline.observe.run_files import RunFileWriter


def written(run_dir: Path, name: str) -> Path:
    path = run_dir / "checkpoints" / name
    path.mkdir(parents=True)
    (path / "meta.json").write_text("{}")
    return path


def tell(run_dir: Path, *events: tuple[str, int, Path]) -> None:
    writer = RunFileWriter(run_dir)
    for number, (kind, step, path) in enumerate(events):
        record = {"type": kind, "text": kind, "step": step, "path": f"/elsewhere/{path.name}"}
        record |= {"reward_mean": 0.5} if kind == "BestCheckpointChosen" else {}
        writer.record(f"{number + 1}-0", 1.0, record)
    writer.close()


def test_a_step_is_a_link_to_what_was_recorded_and_best_to_the_best(tmp_path: Path) -> None:
    good, late = written(tmp_path, "step-000001.a-1"), written(tmp_path, "step-000001.b-1")
    second = written(tmp_path, "step-000002.a-2")
    tell(
        tmp_path,
        ("CheckpointRecorded", 1, good),
        ("BestCheckpointChosen", 1, good),
        ("CheckpointRecorded", 2, second),
    )
    folder = tmp_path / "checkpoints"
    assert (folder / "step-000001").resolve() == good and late.is_dir()
    assert (folder / "best").resolve() == good
    assert [p.name for p in complete(folder)] == ["step-000001", "step-000002"]
    tell(tmp_path, ("BestCheckpointChosen", 2, second))
    assert str((folder / "best").readlink()) == second.name


def test_a_voided_or_deleted_checkpoint_has_no_link(tmp_path: Path) -> None:
    good, bad = written(tmp_path, "step-000001.b-1"), written(tmp_path, "step-000001.a-1")
    tell(tmp_path, ("CheckpointRecorded", 1, bad), ("CheckpointVoided", 1, bad))
    link = tmp_path / "checkpoints" / "step-000001"
    assert not link.is_symlink()
    assert complete(link.parent) == [good], "nobody picks the voided one, which is still there"
    tell(tmp_path, ("CheckpointRecorded", 1, good), ("CheckpointRecorded", 1, good))
    assert link.resolve() == good
    unlink(bad)
    assert link.is_symlink(), "another directory's"
    unlink(good)
    assert not link.is_symlink()


def test_neither_the_newest_nor_the_best_checkpoint_of_a_run_is_a_voided_one(
    tmp_path: Path,
) -> None:
    good, bad = written(tmp_path, "step-000001.a-1"), written(tmp_path, "step-000002.a-2")
    told = [("CheckpointRecorded", 1, good), ("CheckpointRecorded", 2, bad)]
    told += [("BestCheckpointChosen", 2, bad), ("CheckpointVoided", 2, bad)]
    tell(tmp_path, *told)
    checkpoints = Projection.read(tmp_path).checkpoints
    assert [Path(c.path).name for c in checkpoints.saved] == [good.name]
    assert checkpoints.best is None
