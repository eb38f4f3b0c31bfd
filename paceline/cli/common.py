"""Arguments that several commands share, and how they find the controllers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

if TYPE_CHECKING:
    from paceline.client import ControlPlane
    from paceline.config.schema import Config

T = TypeVar("T")


class BadInput(Exception):
    """The command cannot be carried out as it was given; the message says what to change."""


ConfigArgument = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="The run's TOML file.", show_default=False)
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="A.B=C", help="Override a setting; may be repeated.", show_default=False
    ),
]
RunDirOption = Annotated[
    Path | None,
    typer.Option("--run-dir", metavar="DIR", help="Directory of the run.", show_default=False),
]
ControllersOption = Annotated[
    str | None,
    typer.Option(
        "--controllers",
        metavar="HOST:PORT,...",
        help="Addresses of the run's controllers.",
        show_default=False,
    ),
]
TokenOption = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="File with the bearer token (or set PACELINE_TOKEN).",
        show_default=False,
    ),
]
TlsOption = Annotated[
    Path | None,
    typer.Option(
        "--tls-ca",
        metavar="FILE",
        help="PEM root that verifies the controllers; turns TLS on.",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


def parse_addresses(text: str) -> list[str]:
    """``host:port,host:port`` as a list. Raises BadInput."""
    addresses = [part.strip() for part in text.split(",") if part.strip()]
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise BadInput(f"--controllers: {address} is not host:port")
    if not addresses:
        raise BadInput("--controllers: no address given; write host:port,host:port")
    return addresses


def run_addresses(run_dir: Path) -> list[str]:
    """Addresses that the controllers of a run directory wrote there. Raises BadInput for none."""
    found = []
    for path in sorted((run_dir / "controllers").glob("*.json")):
        try:
            found.append(str(json.loads(path.read_text())["address"]))
        except (OSError, ValueError, KeyError):
            continue
    if not found:
        if not run_dir.is_dir():
            raise BadInput(f"--run-dir: {run_dir}: no such directory")
        raise BadInput(f"--run-dir: {run_dir}: no controller has been started in it")
    return found


def run_config(run_dir: Path) -> Config:
    """The resolved configuration that ``paceline up`` left in the run directory."""
    from paceline.config.load import load_config

    path = run_dir / "config.toml"
    if not path.is_file():
        raise BadInput(f"--run-dir: {run_dir} has no config.toml: not a run directory")
    return load_config(path)


def with_control(
    run_dir: Path | None,
    controllers: str | None,
    token_file: Path | None,
    tls_ca: Path | None,
    work: Callable[[ControlPlane], Awaitable[T]],
) -> T:
    """Runs ``work`` with a client of the controllers that the arguments name."""
    from paceline.auth import client_root, read_token
    from paceline.client import ControlPlane
    from paceline.config.schema import AuthConfig

    if (run_dir is None) == (controllers is None):
        raise BadInput("give either --run-dir DIR or --controllers HOST:PORT,...")
    auth = AuthConfig()
    if run_dir is not None:
        addresses = run_addresses(run_dir)
        if (run_dir / "config.toml").is_file():
            auth = run_config(run_dir).auth
    else:
        addresses = parse_addresses(controllers or "")
    given: dict[str, Any] = {}
    if token_file is not None:
        given["token_file"] = str(token_file)
    if tls_ca is not None:
        given["tls_ca"] = str(tls_ca)
    auth = auth.model_copy(update=given)

    async def session() -> T:
        control = ControlPlane(addresses, token=read_token(auth), tls_ca=client_root(auth))
        try:
            return await work(control)
        finally:
            await control.close()

    return asyncio.run(session())
