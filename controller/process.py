"""Controller process: start, serving and end.

    settings checked ──► ports bound ──► Redis there ──► gRPC and REST answer ──► controller runs
                                                                                      │ SIGTERM
                                     server stops ◄── lease handed over ◄─────────────┘

The server is up before the data set is read and before Redis is asked for anything but its address:
a process that cannot lead yet can say so.
"""

import asyncio
import gc
import hashlib
import json
import keyword
import logging
import os
import re
import secrets
import socket
from pathlib import Path
from typing import Any

from controller.context import ControllerContext
from controller.fleet_loops import keep_fleet
from controller.housekeeping import SYNC_S
from controller.replicated_controller import Controller
from controller.rest.server import RestServer, open_door
from controller.runtime import cancel_all
from controller.services import admin, policy, rollout, worker
from controller.services.grpc_server import Services
from controller.store.stores import redis_stores
from paceline.config.schema import Config
from paceline.errors import BadInput
from paceline.observe.sinks.base import check_sinks
from paceline.payloads.open_store import check_store, check_urls
from paceline.process import stacks
from paceline.process.files import new_private_directory, private_directory, replace_file
from paceline.process.lifetime import leave_on_signal, started_s
from paceline.process.structured_log import event
from paceline.redis.leader_lease import LeaderIdentity
from paceline.redis.server import REDIS_OUT_OF_REACH, ensure_redis, out_of_reach, stop_redis
from paceline.rpc.addresses import at, is_loopback
from paceline.rpc.auth import own_token, read_token
from paceline.rpc.grpc_channel import METHODS
from paceline.rpc.listeners import UNIX, add_port, new_server, socket_path
from paceline.weights.weight_store import SETTING

log = logging.getLogger(__name__)

GRACE_S = 0.3
FRONT_S = 1.0

SERVICES = {
    "WorkerService": worker,
    "RolloutService": rollout,
    "PolicyService": policy,
    "AdminService": admin,
}


def handlers() -> dict[str, Any]:
    """Handler of each method that a controller serves: the function of the method's name, in snake
    case, in the module of its service. AttributeError if one is missing."""
    found = {}
    for name in METHODS:
        service, _, method = name.partition(".")
        if service in SERVICES:
            snake = re.sub(r"(?<!^)(?=[A-Z])", "_", method).lower()
            function = f"{snake}_" if keyword.iskeyword(snake) else snake
            found[name] = getattr(SERVICES[service], function)
    return found


async def serve(
    config: Config,
    *,
    run_dir: Path,
    controller_id: str,
    port: int | None = None,
    advertise: str | None = None,
) -> None:
    """Runs one controller until SIGTERM or SIGINT, then hands the lease over and returns. ``port``:
    to bind; default: ``controller.port``. 0: a Unix socket on one machine, else any free port.
    ``advertise``: host name or address under which others reach this one. Raises BadInput with what
    is wrong and the remedy."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    leave_on_signal(stop.set, config.fleet.drain_s, loop)
    configured = check_bind(config)
    check_sinks(config)
    _make_run_dir(run_dir)
    token = configured or own_token(run_dir)
    stacks.install()
    _calm_garbage_collector()
    server = new_server(config)
    host = advertise or _reachable(config.controller.host)
    wanted = config.controller.port if port is None else port
    if is_loopback(config.controller.host) and not wanted:
        address = f"{UNIX}{socket_path(run_dir, controller_id)}"
        add_port(server, address, config.auth, token)
    else:
        served = (run_dir / "controllers" / f"{controller_id}.json").exists()
        listening = at(config.controller.host, wanted)
        try:
            bound = add_port(server, listening, config.auth, token)
        except BadInput:
            # Who takes the ports of controllers that have died must not end the run: clients read
            # the addresses again.
            if not (wanted and served):
                raise
            bound = add_port(server, at(config.controller.host, 0), config.auth, token)
            event(log, "port taken", logging.WARNING, port=wanted, instead=bound)
        address = at(host, bound)
    door = open_door(config, run_dir, controller_id, token=token, host=host)
    endpoint = await asyncio.to_thread(ensure_redis, run_dir, config.redis)
    if endpoint.healed:
        event(log, "journal healed", logging.WARNING, how=endpoint.healed)
    identity = LeaderIdentity(
        controller_id=controller_id,
        address=address,
        host=socket.gethostname(),
        pid=os.getpid(),
        nonce=secrets.token_hex(8),
        fleet=hashlib.sha256(f"fleet {token}".encode()).hexdigest()[:12],
    )
    local = is_loopback(config.redis.host)
    worker_url = endpoint.worker_url if local else endpoint.worker_url_at(host)
    stores = redis_stores(config, identity, endpoint.url, worker_url=worker_url)
    if stores.payload_urls:
        await check_store(stores.payloads, stores.payload_urls)
    if config.weights.url is not None:
        await check_urls([config.weights.url], SETTING)
    context = ControllerContext(config, run_dir, identity, stores)
    controller = Controller(context, keep_fleet)
    server.add_generic_rpc_handlers((Services(controller, handlers(), token),))
    await server.start()
    controller.rest_url = door.url if door is not None else ""
    _write_address(run_dir, identity, controller.rest_url)
    event(log, "serving", address=identity.address, pid=identity.pid)
    keeping = asyncio.create_task(_keep_front(config, run_dir))
    rest = RestServer(controller, door) if door is not None else None
    if rest is not None:
        rest.start()
    try:
        await _run_until(stop, controller)
    except BadInput:
        if endpoint.started:
            # Nobody asked for a server that outlives a run which could not start.
            await asyncio.to_thread(stop_redis, run_dir)
        raise
    finally:
        keeping.cancel()
        if rest is not None:
            await rest.stop()
        # Also before a refusal ends the process: a server that is freed while it answers corrupts
        # memory, and the launcher sees a crash instead of the reason.
        await server.stop(GRACE_S)
        await stores.close()


async def _keep_front(config: Config, run_dir: Path) -> None:
    """Starts the listener for workers on other machines again whenever it has ended."""
    told = ""
    while True:
        await asyncio.sleep(FRONT_S)
        if why := out_of_reach(run_dir, config.redis):
            try:
                await asyncio.to_thread(ensure_redis, run_dir, config.redis)
                why = out_of_reach(run_dir, config.redis)
            except (BadInput, OSError) as error:
                why = str(error)
        if why and why != told:
            event(log, "other machines cannot reach Redis", logging.WARNING, why=why)
        told = why


async def _run_until(stop: asyncio.Event, controller: Controller) -> None:
    running = asyncio.create_task(controller.run())
    running.add_done_callback(lambda _: stop.set())
    await stop.wait()
    if running.done():
        running.result()
    # Longer than a leader takes to hand over. That of a run that has ended first waits until the
    # record of the last checkpoint is synced, to delete the payloads.
    await cancel_all([running], again_s=SYNC_S + 1.5)


def check_bind(config: Config) -> str | None:
    """The configured token; None: the run's own one is demanded. If other machines can reach the
    server, a configured token and a Redis that they can reach are required."""
    token = read_token(config.auth)
    host = config.controller.host
    if is_loopback(host):
        return token
    if token is None:
        raise BadInput(
            f"controller.host = {host!r} is not loopback: anyone who reaches it could steer the "
            "run. Set auth.token_file (and auth.tls_cert, auth.tls_key), or bind to 127.0.0.1"
        )
    if config.redis.url is None and is_loopback(config.redis.host):
        raise BadInput(REDIS_OUT_OF_REACH.format(host=host))
    return token


def _calm_garbage_collector() -> None:
    """Collections as frequent as by default took a tenth of the leader's time and found nothing."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def _make_run_dir(run_dir: Path) -> None:
    try:
        private_directory(new_private_directory(run_dir) / "controllers")
    except OSError as error:
        raise BadInput(
            f"run directory {run_dir} cannot be made ({error.strerror}): choose another with "
            "--run-dir"
        ) from error


def _reachable(host: str) -> str:
    """``host``, or if that stands for all addresses, one that others can use."""
    if host not in ("0.0.0.0", "::"):
        return host
    name = socket.gethostname()
    try:
        return socket.gethostbyname(name)
    except OSError:
        return name


def _write_address(run_dir: Path, identity: LeaderIdentity, rest_url: str) -> None:
    written = {
        "address": identity.address,
        "pid": identity.pid,
        "started": started_s(identity.pid),
        "rest": rest_url,
    }
    path = run_dir / "controllers" / f"{identity.controller_id}.json"
    replace_file(path, f"{json.dumps(written)}\n".encode())
