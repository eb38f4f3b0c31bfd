"""``paceline doctor``: what is wrong with a machine is found, told with a remedy, and is status
1."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.config.load import load_config
from paceline.config.schema import Config
from paceline.rpc.addresses import free_ports
from paceline_launcher.cli import app
from paceline_launcher.preflight import machine
from paceline_launcher.preflight.checks import Place, run_checks
from paceline_launcher.preflight.findings import Finding, Start


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    path = tmp_path / "run.toml"
    path.write_text(
        f'[model]\npath = "{model}"\ndevice = "cpu"\n'
        f'[data]\npath = "{tmp_path / "rows.jsonl"}"\n'
        "[reward]\nprocesses = 0\n"
    )
    return path


def examined(config: Config | None, run_dir: Path) -> dict[str, list[Finding]]:
    found: dict[str, list[Finding]] = {}
    for finding in run_checks(Start(config, run_dir), ~Place(0)):
        found.setdefault(finding.name, []).append(finding)
    return found


def test_a_machine_that_runs_the_tests_is_fit_and_every_complaint_has_a_remedy(
    config_file: Path, tmp_path: Path
) -> None:
    found = examined(load_config(config_file), tmp_path)
    for name in ("python", "devices", "redis", "model", "data"):
        assert [c.state for c in found[name]] == ["ok"] * len(found[name]), found[name]
    assert [c.state for c in found["settings"]] == ["ok"]
    assert {"vllm", "shared memory", "disk"} <= found.keys()
    for checks in found.values():
        assert all(c.found and (c.state == "ok" or c.remedy) for c in checks)


def test_wrong_inputs_and_a_dead_redis_fail(config_file: Path) -> None:
    (free,) = free_ports("127.0.0.1", 1)
    sets = ["--set", f"redis.url=redis://127.0.0.1:{free}/0"]
    sets += ["--set", "data.prompt_field=nothing"]
    shown = CliRunner().invoke(app, ["doctor", str(config_file), "--json", *sets])
    assert shown.exit_code == 1
    found = json.loads(shown.output)
    assert found["ok"] is False
    failed = {c["name"]: c for c in found["checks"] if c["state"] == "fail"}
    assert str(free) in failed["redis"]["remedy"]
    assert "nothing" in failed["data"]["found"]


def test_a_disk_without_room_for_a_journal_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "DISK_FAIL", 1 << 60)
    (check,) = examined(None, tmp_path / "new" / "run")["disk"]
    assert check.state == "fail" and str(tmp_path) in check.found and "--run-dir" in check.remedy
    assert not (tmp_path / "new").exists()


def test_a_cuda_run_on_a_machine_without_a_gpu_fails(config_file: Path, tmp_path: Path) -> None:
    import torch

    config = load_config(config_file, ["model.device=cuda"])
    (check,) = examined(config, tmp_path)["devices"]
    assert check.state == ("ok" if torch.cuda.is_available() else "fail")
