"""GPUs are counted as CUDA counts them."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline_launcher.node_placement import visible_gpus


@pytest.mark.parametrize(
    ("named", "seen"),
    [
        ("2,3", ("2", "3")),
        ("GPU-8d1c, GPU-77aa", ("GPU-8d1c", "GPU-77aa")),
        ("", ()),
        ("-1", ()),
        ("0,-1,1", ("0",)),
    ],
)
def test_the_variable_names_those_that_a_process_may_use(
    named: str, seen: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "nvidia0").touch()
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": named}, tmp_path) == seen


def test_without_the_variable_the_device_files_are_counted(tmp_path: Path) -> None:
    # Those of a container that got the third and the eighth GPU of its machine.
    for name in ("nvidia2", "nvidia7", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == ("0", "1")
