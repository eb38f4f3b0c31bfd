"""Options of `paceline render`: what is refused, and what the message says to do."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.errors import BadInput
from paceline_launcher.cli import app
from paceline_launcher.render.options import limit_minutes
from tests.fixtures.rendered import CPU, EXAMPLES, IMAGE, render

GPU = EXAMPLES / "qwen3_8b.toml"
SLURM = ("--target", "slurm")
K8S = ("--target", "kubernetes", "--image", IMAGE)
JOB = ("--target", "pytorchjob", "--image", IMAGE, "--gpus-per-node", "8")
PAI = (
    *("--target", "pai-dlc", "--image", IMAGE, "--workspace", "1", "--resource-quota", "q"),
    *("--volume", "d-runs:/runs"),
)


def refused(*words: str) -> str:
    done = CliRunner().invoke(app, ["render", *words, "--out", "-"])
    assert done.exit_code != 0
    assert isinstance(done.exception, BadInput), done.output
    return str(done.exception)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((CPU, "--target", "mesos"), "--target mesos: choose kubernetes"),
        ((CPU, "--target", "kubernetes"), "--image is missing"),
        ((CPU, "--target", "kubernetes", "--image", "paceline:latest"), "does not move"),
        ((GPU, *K8S), "give the number of GPUs"),
        ((CPU, *K8S, "--gpus-per-node", "8"), 'model.device = "cpu"'),
        ((GPU, *K8S, "--gpus-per-node", "4"), "a policy worker has 8 GPUs"),
        ((CPU, *K8S, "--partition", "gpu"), "--partition has no effect with --target kubernetes"),
        ((CPU, *K8S, "--nccl-env", "WANDB_API_KEY=x"), "no secrets"),
        ((CPU, *K8S, "--host-network"), "--node-cidr"),
        ((CPU, *K8S, "--set", "payloads.url=redis://:pw@h:6379/0"), "payloads.url"),
        ((CPU, *SLURM, "--time-limit", "soon"), "--time-limit soon: write D-HH:MM:SS"),
        ((CPU, *SLURM, "--time-limit", "0:30"), "fleet.stop_s"),
        ((CPU, *SLURM, "--partition", "a b"), "no space"),
        ((GPU, *JOB, "--nodes", "1"), "Give --nodes 2"),
        ((CPU, *PAI, "--job-type", "mpi"), "--job-type mpi: choose custom or pytorch"),
        ((CPU, *PAI, "--nodes", "2"), "--job-type pytorch"),
        ((CPU, *PAI, "--run-dir", "/elsewhere/a"), "no data set holds the run directory"),
    ],
)
def test_what_cannot_be_rendered_is_refused_with_the_remedy(
    words: tuple[str, ...], message: str
) -> None:
    assert message in refused(*map(str, words))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("7-00:00:00", 10080), ("90", 90), ("1:30:01", 91), ("2-12", 3600), ("5:30", 6), ("0", None)],
)
def test_a_time_limit_is_read_as_slurm_reads_it(text: str, expected: int | None) -> None:
    assert limit_minutes(text) == expected


def test_an_edited_template_replaces_the_one_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "kubernetes").mkdir()
    edited = tmp_path / "kubernetes/storage.yaml.j2"
    edited.write_text("# {{ run.name }}, {{ options.storage_gib }} GiB\n")
    files = render(CPU, *K8S[1:], "--templates", str(tmp_path))
    assert files["storage.yaml"] == "# demo, 50 GiB\n"
    assert files["redis.yaml"] == render(CPU, *K8S[1:])["redis.yaml"]
    edited.write_text("{{ run.nothing }}")
    assert "storage.yaml.j2" in refused(str(CPU), *K8S, "--templates", str(tmp_path))


def test_existing_files_are_replaced_only_if_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["render", str(CPU), *K8S, "--out", "here"]
    done = CliRunner().invoke(app, [*words, "--out=-"])
    assert "# ---- redis.yaml\n" in done.stdout
    assert list(tmp_path.iterdir()) == []
    assert CliRunner().invoke(app, words).exit_code == 0
    assert {path.name for path in Path("here").iterdir()} == set(render(CPU, *K8S[1:]))
    changed = Path("here/redis.yaml")
    changed.write_text("mine")
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, BadInput) and "--force replaces them" in str(done.exception)
    assert changed.read_text() == "mine"
    assert CliRunner().invoke(app, [*words, "--force"]).exit_code == 0
    assert changed.read_text() == render(CPU, *K8S[1:])["redis.yaml"]
