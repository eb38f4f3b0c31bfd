"""Other users of a run's machine, who have no token: nothing of the run is shown or done to
them."""

import json
import os
import stat
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import grpc.aio
import psutil
import pytest
import redis

from paceline.config.sections.services import RedisConfig
from paceline.redis.client import connect_sync
from paceline.redis.server import ensure_redis, stop_redis
from paceline.rpc.client import ControlPlane, RequestRefused
from paceline.rpc.grpc_channel import METHODS
from paceline.v1 import common_pb2, worker_pb2
from testbed.fleets.controller_processes import Controllers, write_config
from testbed.fleets.controllers import (
    addresses,
    config_of,
    control_of,
    running_controllers,
    status,
    until,
)
from testbed.workers.fake_workers import FakeRollout
from tests.fixtures.rest import rest_url

SERVER_COMMANDS = (
    "CONFIG SET dir /tmp",
    "CONFIG SET dbfilename x",
    "CONFIG GET *",
    "CONFIG REWRITE",
    "SAVE",
    "BGSAVE",
    "BGREWRITEAOF",
    "MODULE LIST",  # as LOAD, of whose refusal the client makes an error of its own
    "FUNCTION LOAD x",
    "SCRIPT FLUSH",
    "DEBUG SLEEP 1",
    "SHUTDOWN NOSAVE",
    "REPLICAOF 127.0.0.1 1",
    "SLAVEOF 127.0.0.1 1",
    "MIGRATE 127.0.0.1 1 x 0 1",
    "FLUSHALL",
    "FLUSHDB",
    "SWAPDB 0 0",
    "KEYS *",
    "MONITOR",
    "CLIENT KILL TYPE normal",
    "CLIENT LIST",
    "CLIENT PAUSE 1000",
    "ACL LIST",
    "ACL SETUSER x on nopass +@all",
    "CLUSTER INFO",
    "PSYNC ? -1",
    "LATENCY LATEST",
    "SUBSCRIBE x",
)
REFUSED = "no permissions|not allowed|Authentication required|already authenticated"


@pytest.mark.parametrize("method", sorted(METHODS))
async def test_on_loopback_no_call_is_answered_without_the_runs_token(
    stranger: Controllers, method: str
) -> None:
    where = addresses(stranger)
    control = ControlPlane(where)
    request = METHODS[method].request()
    if method == "WorkerService.Register":
        request = worker_pb2.RegisterRequest(
            caller=common_pb2.Caller(worker_id="w", incarnation=1),
            role=common_pb2.ROLE_ROLLOUT,
            ranks=1,
            config_json="{}",
        )
    with pytest.raises(RequestRefused) as refusal:
        if METHODS[method].streams:
            answered = None
            while answered is None:
                call = control.bind(where[0], method)(iter([request]))
                try:
                    answered = await call.read()
                except grpc.aio.AioRpcError as error:
                    # A connection that broke is no answer: as a worker does, it asks again.
                    control.failed(where[0], error)
        else:
            await control.call(method, request)
    await control.close()
    assert refusal.value.code == "UNAUTHENTICATED"
    assert "--run-dir" in refusal.value.message, "the remedy"
    assert "train." not in refusal.value.message, "no setting of the run"


async def test_a_token_that_is_nearly_right_is_wrong(stranger: Controllers) -> None:
    right = (stranger.run_dir / "token").read_text().strip()
    for wrong in ("x" * len(right), right[:-1]):
        control = ControlPlane(addresses(stranger), token=wrong)
        with pytest.raises(RequestRefused, match="UNAUTHENTICATED"):
            await status(control)
        await control.close()


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    with running_controllers(tmp_path_factory.mktemp("strangers"), 1) as controllers:
        yield controllers


async def test_a_worker_gets_a_redis_user_that_can_only_meet_others(tmp_path: Path) -> None:
    with running_controllers(tmp_path, 1) as controllers:
        worker = FakeRollout(config_of(controllers), addresses(controllers), "rollout-0")
        reply = await worker.session.register()
        await worker.stop(goodbye=False)
        with connect_sync(reply.rendezvous_url) as client:
            client.hset("paceline:load:rdv:mesh:1:0", "claim:0", b"here")
            for refused in (
                lambda: client.get("paceline:load:leader"),
                lambda: client.xrange("paceline:load:journal"),
                lambda: client.delete("paceline:load:journal"),
                lambda: client.hset("paceline:load:head", "n", "9"),
                lambda: client.eval("return redis.call('GET', KEYS[1])", 1, "paceline:load:term"),
                lambda: client.info(),
            ):
                with pytest.raises(redis.exceptions.NoPermissionError):
                    refused()
        control = control_of(controllers)
        assert (await status(control)).leader == "controller-0"
        await control.close()


@pytest.mark.parametrize("user", ["controller", "worker", "nobody"])
def test_no_user_of_the_embedded_redis_commands_the_server(server: str, user: str) -> None:
    url = {"controller": server.split(" ")[0], "worker": server.split(" ")[1]}.get(user, "")
    if user == "nobody":
        url = "unix://" + server.split(" ")[0].rpartition("@")[2]
    with connect_sync(url) as client:
        for command in SERVER_COMMANDS:
            with pytest.raises(redis.exceptions.RedisError, match=REFUSED):
                client.execute_command(*command.split(" "))


def test_the_controllers_user_has_the_keys_of_runs_alone(server: str) -> None:
    with connect_sync(server.split(" ")[0]) as client:
        client.set("paceline:r:x", b"1")
        for command in (("SET", "other", "1"), ("GET", "other"), ("DEL", "other")):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*command)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    directory = tmp_path_factory.mktemp("server")
    endpoint = ensure_redis(directory, RedisConfig())
    yield f"{endpoint.url} {endpoint.worker_url}"
    stop_redis(directory)


async def test_files_of_a_run_are_private_whatever_the_umask(tmp_path: Path) -> None:
    write_config(tmp_path).chmod(0o600)  # of the user's own: others may not write it
    before = os.umask(0)
    try:
        with running_controllers(tmp_path, 1) as controllers:
            worker = FakeRollout(config_of(controllers), addresses(controllers), "rollout-0")
            await worker.start()
            await until(lambda: (controllers.run_dir / "events.jsonl").exists())
            await worker.stop()
            run_dir = controllers.run_dir
            open_to_others = {
                str(path.relative_to(tmp_path)): oct(path.stat().st_mode)
                for path in (run_dir, *run_dir.rglob("*"))
                if not path.is_symlink() and stat.S_IMODE(path.stat().st_mode) & 0o077
            }
            assert open_to_others == {}
            names = {path.name for path in run_dir.rglob("*")}
            assert {"token", "password", "redis.conf", "events.jsonl", "controller-0.json"} <= names
            assert json.loads((run_dir / "controllers" / "controller-0.json").read_text())
    finally:
        os.umask(before)


def test_on_one_machine_only_the_page_listens_on_a_port(tmp_path: Path) -> None:
    """Nothing that takes a credential can be reached, or be replaced, by another user."""
    with running_controllers(tmp_path, 1) as controllers:
        page = urlsplit(rest_url(controllers)).port
        token = (controllers.run_dir / "token").read_text().strip()
        for pid, ports in ((controllers.started[0].pid, {page}), (controllers.redis_pid, set())):
            process = psutil.Process(pid)
            listening = [c for c in process.net_connections("inet") if c.status == "LISTEN"]
            assert {c.laddr.port for c in listening} == ports
            assert token not in " ".join(process.cmdline())
        (address,) = addresses(controllers)
        for path in (address, urlsplit(controllers.redis_url).path):
            home = Path(path.removeprefix("unix:")).parent
            assert stat.S_IMODE(home.lstat().st_mode) == 0o700
