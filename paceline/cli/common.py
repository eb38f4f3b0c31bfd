"""Arguments that several commands share, and how they find the controllers."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from paceline.errors import BadInput

if TYPE_CHECKING:
    from paceline.config.schema import AuthConfig, Config
    from paceline.rpc.client import ControlPlane
    from paceline.rpc.rest_client import RestReader

T = TypeVar("T")


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


def is_number(text: str, least: int, most: int) -> bool:
    """Whether ``text`` is a number in plain digits, in the range."""
    return text.isascii() and text.isdigit() and len(text) <= 20 and least <= int(text) <= most


def parse_addresses(text: str) -> list[str]:
    """``host:port,host:port`` as a list. Raises BadInput."""
    addresses = [part.strip() for part in text.split(",") if part.strip()]
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not is_number(port, 1, 65535):
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


@dataclass(frozen=True, slots=True)
class Target:
    """The controllers that a command's arguments name, and how to speak to them."""

    addresses: list[str]
    auth: AuthConfig

    def control(self) -> ControlPlane:
        """A client for one event loop. Raises AuthError and BadInput."""
        from paceline.rpc.auth import read_token
        from paceline.rpc.client import ControlPlane

        return ControlPlane(self.addresses, token=read_token(self.auth), tls_ca=self._root())

    def rest(self, urls: Sequence[str]) -> RestReader:
        """A reader of the REST interfaces at ``urls``. Raises AuthError and BadInput."""
        from paceline.rpc.auth import read_token
        from paceline.rpc.rest_client import RestReader

        return RestReader(urls, token=read_token(self.auth), tls_ca=self._root())

    def _root(self) -> Path | None:
        import ssl

        from paceline.rpc.auth import client_root

        root = client_root(self.auth)
        if root is not None:
            try:
                ssl.create_default_context(cafile=str(root))
            except OSError as error:
                why = error.strerror or error
                raise BadInput(f"--tls-ca: {root} is no PEM file to be read: {why}") from error
        return root


def find_target(
    run_dir: Path | None,
    controllers: str | None,
    token_file: Path | None = None,
    tls_ca: Path | None = None,
) -> Target:
    """Raises BadInput where the arguments name no controllers, or two ways to find them."""
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
    return Target(addresses, auth.model_copy(update=given))


def with_control(
    run_dir: Path | None,
    controllers: str | None,
    token_file: Path | None,
    tls_ca: Path | None,
    work: Callable[[ControlPlane], Awaitable[T]],
) -> T:
    """Runs ``work`` with a client of the controllers that the arguments name."""
    target = find_target(run_dir, controllers, token_file, tls_ca)

    async def session() -> T:
        control = target.control()
        try:
            return await work(control)
        finally:
            await control.close()

    return asyncio.run(session())


def run_rest_urls(run_dir: Path) -> list[str]:
    """Of the REST interfaces that controllers of ``run_dir`` serve or served; may be empty."""
    found = []
    for path in sorted((run_dir / "controllers").glob("*.json")):
        try:
            found.append(str(json.loads(path.read_text()).get("rest") or ""))
        except (OSError, ValueError, AttributeError):
            continue
    return [url for url in found if url]


def last_known(run_dir: Path) -> str:
    """How the run in ``run_dir`` ended, for a message; empty where it has no summary."""
    from paceline.run_view.summary import read_summary

    summary = read_summary(run_dir)
    if summary is None:
        return ""
    return f"{summary.get('status')} after {summary.get('steps')} steps"


def print_json(value: Any) -> None:
    """``value`` on standard output; JSON has no NaN and no infinity: they become null."""
    typer.echo(json.dumps(_finite(value), indent=2))


def print_json_line(value: Any) -> None:
    """The same on one line, for a stream of objects."""
    typer.echo(json.dumps(_finite(value), separators=(",", ":")))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value
