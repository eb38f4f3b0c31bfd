"""Options of `paceline render`: what is refused, and what the message says to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.errors import BadInput
from paceline_launcher.cli import app
from paceline_launcher.cli import main as paceline_main
from tests.fixtures.rendered import EXAMPLES, IMAGE, render

CPU, GPU = EXAMPLES / "digit_sort.toml", EXAMPLES / "qwen3_8b.toml"
SLURM = ("--target", "slurm")
K8S = ("--target", "kubernetes", "--image", IMAGE)


def refused(*words: str) -> str:
    done = CliRunner().invoke(app, ["render", *words, "--dry-run"])
    assert done.exit_code != 0
    assert isinstance(done.exception, BadInput), done.output
    return str(done.exception)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((str(CPU), "--target", "mesos"), "--target mesos: choose kubernetes"),
        ((str(CPU), "--target", "kubernetes"), "--image is missing"),
        ((str(CPU), "--target", "kubernetes", "--image", "paceline"), "a tag that does not move"),
        ((str(CPU), "--target", "kubernetes", "--image", "h:5000/paceline"), "does not move"),
        ((str(CPU), "--target", "kubernetes", "--image", "paceline:latest"), "does not move"),
        ((str(GPU), *K8S), "--gpus-per-node is missing"),
        ((str(GPU), *K8S, "--gpus-per-node", "0"), "--gpus-per-node 0: it is at least 1"),
        ((str(CPU), *K8S, "--gpus-per-node", "8"), 'model.device = "cpu"'),
        ((str(GPU), *K8S, "--gpus-per-node", "4"), "a policy worker has 8 GPUs"),
        ((str(CPU), *K8S, "--partition", "gpu"), "--partition has no effect with --target kuber"),
        ((str(CPU), *K8S, "--namespace", "Mine"), "--namespace Mine: use at most 63 lower-case"),
        ((str(CPU), *K8S, "--volume", "data"), "--volume data: write NAME:/PATH"),
        ((str(CPU), *K8S, "--volume", "data:here"), "write NAME:/PATH"),
        ((str(CPU), *K8S, "--nccl-env", "NCCL_DEBUG"), "write NAME=VALUE"),
        ((str(CPU), *K8S, "--nccl-env", "WANDB_API_KEY=x"), "rendered files contain no secrets"),
        ((str(CPU), *K8S, "--rdma", "rdma/hca=0"), "--rdma rdma/hca=0: write the resource"),
        ((str(CPU), *K8S, "--host-network"), "give them as --node-cidr"),
        ((str(CPU), *SLURM, "--time-limit", "soon"), "--time-limit soon: write D-HH:MM:SS"),
        (
            (str(CPU), *SLURM, "--time-limit", "0:30"),
            "asked to stop 120 s before its end (fleet.stop_s)",
        ),
        (
            (str(CPU), *K8S, "--set", "payloads.url=redis://:pw@h:6379/0"),
            "payloads.url contains a password",
        ),
    ],
)
def test_what_cannot_be_rendered_is_refused_with_the_remedy(
    words: tuple[str, ...], message: str
) -> None:
    assert message in refused(*words)


def test_existing_files_are_replaced_only_if_asked(tmp_path: Path) -> None:
    words = ["render", str(CPU), *K8S, "--out", str(tmp_path)]
    assert CliRunner().invoke(app, words).exit_code == 0
    written = {path.name for path in tmp_path.iterdir()}
    assert written == set(render(CPU, *K8S[1:]))
    changed = tmp_path / "redis.yaml"
    changed.write_text("mine")
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, BadInput) and "--force replaces them" in str(done.exception)
    assert changed.read_text() == "mine"
    assert CliRunner().invoke(app, [*words, "--force"]).exit_code == 0
    assert changed.read_text() == render(CPU, *K8S[1:])["redis.yaml"]


def test_a_dry_run_prints_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    for last in ("--dry-run", "--out=-"):
        config = (CPU, "--set", f"model.path={CPU.parent}")
        done = CliRunner().invoke(app, ["render", *map(str, config), *K8S, last])
        assert done.exit_code == 0, done.output
        assert "# ---- redis.yaml\n" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_is_one_line_and_exit_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["paceline", "render", str(CPU), "--target", "kubernetes"])
    with pytest.raises(SystemExit) as left:
        paceline_main()
    assert left.value.code == 2
    assert capsys.readouterr().err.startswith("error: --image is missing")
