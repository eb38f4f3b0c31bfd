"""Starting a controller, and who may speak to it."""

import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import grpc.aio
import pytest

from controller import process
from paceline.config.load import load_config
from paceline.config.schema import Config
from paceline.errors import BadInput
from paceline.observe.run_watcher import follow_events
from paceline.redis.server import stop_redis
from paceline.rpc.addresses import free_ports
from paceline.rpc.client import ControlPlane
from paceline.v1 import admin_pb2
from testbed.fleets.controller_processes import Controllers, write_config
from testbed.fleets.controllers import (
    addresses,
    config_of,
    control_of,
    running_controllers,
    status,
    until,
)
from testbed.patience import patient
from tests.fixtures.certificates import self_signed

TOKEN = "0123456789abcdef0123456789abcdef"


def start(config: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a controller that is expected to end by itself."""
    return subprocess.run(
        [sys.executable, "-m", "controller", str(config), *arguments],
        capture_output=True,
        text=True,
        timeout=patient(60),
    )


def assert_one_clear_line(ended: subprocess.CompletedProcess[str], *words: str) -> None:
    lines = [x for x in ended.stderr.splitlines() if x.startswith("controller: ")]
    assert ended.returncode == 2, ended.stderr
    assert len(lines) == 1 and "Traceback" not in ended.stderr, ended.stderr
    for word in words:
        assert word in lines[0], lines[0]


def test_port_in_use_is_one_clear_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        ended = start(write_config(tmp_path), "--run-dir", str(tmp_path / "r"), "--port", port)
    assert_one_clear_line(ended, port, "in use", "controller.port")
    # It had not started anything else yet.
    assert not (tmp_path / "r" / "redis").exists()


async def test_a_controller_whose_port_was_taken_while_it_was_dead_moves(tmp_path: Path) -> None:
    with Controllers(tmp_path, write_config(tmp_path)) as own, socket.socket() as stranger:
        (port,) = free_ports("127.0.0.1", 1)
        own.start(port=port).kill()
        where = [f"127.0.0.1:{port}"]
        control = ControlPlane.from_config(config_of(own), where, own.run_dir)
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stranger.bind(("127.0.0.1", port))
        stranger.listen()
        options = ("--run-dir", str(own.run_dir), "--id", "controller-0", "--port", str(port))
        again = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "controller", str(own.config), *options)
        )
        try:
            await control.call("AdminService.GetStatus", admin_pb2.StatusRequest(), patient(60))
            assert control.address != where[0]
        finally:
            again.terminate()
            await again.wait()
            await control.close()


def test_a_config_that_cannot_work_is_one_clear_line(tmp_path: Path) -> None:
    """Others: tests/golden/commands.txt."""
    config = write_config(tmp_path, redis={"url": "redis://:secret@127.0.0.1:1/0"})
    ended = start(config, "--run-dir", str(tmp_path / "r"))
    assert_one_clear_line(ended, "127.0.0.1:1", "redis.url")
    assert "secret" not in ended.stderr and not (tmp_path / "r" / "redis").exists()


def test_unreadable_data_is_one_clear_line_and_leaves_no_redis(tmp_path: Path) -> None:
    config = write_config(tmp_path, data={"path": str(tmp_path / "nothing.jsonl")})
    ended = start(config, "--run-dir", str(tmp_path / "r"))
    left_running = stop_redis(tmp_path / "r")
    assert_one_clear_line(ended, "nothing.jsonl")
    assert (tmp_path / "r" / "redis").exists()
    assert not left_running


def test_other_data_than_the_runs_is_refused(tmp_path: Path) -> None:
    with running_controllers(tmp_path, 1) as controllers:
        asyncio.run(_leads(controllers))
        with (tmp_path / "rows.jsonl").open("a") as rows:
            rows.write('{"prompt": "one more", "answer": "x"}\n')
        controllers.started[0].kill()
        ended = start(controllers.config, "--run-dir", str(controllers.run_dir))
        assert_one_clear_line(ended, "data_digest")


async def _leads(controllers: Controllers) -> None:
    """Waits until the beginning of the term is durable, not only decided."""
    control = control_of(controllers)

    async def leader() -> bool:
        events = follow_events(control, follow=False)
        return "TermBegun" in [event["type"] async for event in events]

    await until(leader)
    await control.close()


def test_a_controller_loads_no_deep_learning_framework_and_little_memory() -> None:
    program = (
        "import sys; import controller.process;"
        "heavy = [m for m in ('torch', 'transformers', 'datasets', 'pandas', 'vllm', 'pyarrow',"
        " 'tensorboardX') if m in sys.modules];"
        # Not getrusage: its peak survives fork and exec, so it would be that of the test runner.
        "peak = [x for x in open('/proc/self/status') if x.startswith('VmHWM')][0];"
        "print(','.join(heavy) or '-', int(peak.split()[1]) / 1024)"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    heavy, rss_mb = output.split()
    assert heavy == "-"
    assert float(rss_mb) < 150


async def test_tls_encrypts_and_names_the_controller(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    files = {"tls_cert": str(certificate), "tls_key": str(key)}
    (port,) = free_ports("127.0.0.1", 1)
    sections = {"auth": files, "controller": {"port": port}}
    with running_controllers(tmp_path, 1, **sections) as controllers:
        where = addresses(controllers)
        control = ControlPlane.from_config(config_of(controllers), where)
        assert (await status(control)).run_name == "load"
        await control.close()
        async with grpc.aio.insecure_channel(where[0]) as plain:
            call = plain.unary_unary("/paceline.v1.AdminService/GetStatus")
            with pytest.raises(grpc.aio.AioRpcError):
                await call(b"", timeout=patient(60))


async def test_a_controller_that_cannot_lead_stops_its_server_before_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was freed while it answered corrupted memory: SIGSEGV in place of the reason, and a
    restart without end."""
    made = process.new_server
    stopped: list[float | None] = []

    def watched(config: Config) -> grpc.aio.Server:
        server = made(config)
        stop = server.stop

        async def told(grace: float | None) -> None:
            stopped.append(grace)
            await stop(grace)

        server.stop = told  # type: ignore[method-assign]
        return server

    monkeypatch.setattr(process, "new_server", watched)
    # They concern the whole process, which is that of the tests.
    monkeypatch.setattr(process, "_calm_garbage_collector", lambda: None)
    monkeypatch.setattr(process.stacks, "install", lambda: None)
    config = load_config(write_config(tmp_path, data={"prompt_field": "absent"}))
    with pytest.raises(BadInput, match="absent"):
        await process.serve(config, run_dir=tmp_path / "r", controller_id="controller-0")
    assert stopped
