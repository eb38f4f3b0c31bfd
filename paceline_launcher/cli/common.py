"""Options that several commands share, the controllers that these options name, and command lines
from signatures and docstrings.

A positional parameter of a command is an argument, and a keyword-only one is an option. The lines
below ``Args:`` in its docstring describe them, as ``name [--flag ...] [METAVAR]: text``. A
parameter whose type is a dataclass stands for the options that its fields are. Limits and parsers
are in ``Annotated``, as typer takes them.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import json
import re
import ssl
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args

import typer
from typer.models import ParameterInfo

from paceline.config.load import load_config
from paceline.config.sections.services import AuthConfig
from paceline.errors import BadInput, Unreachable, UserError
from paceline.observe.run_files import finite
from paceline.rpc.addresses import written_by_controllers

if TYPE_CHECKING:
    from paceline.config.schema import Config
    from paceline.rpc.client import ControlPlane

T = TypeVar("T")
ANSWER_LIMIT_S = 20.0
ENTRY = re.compile(r"(\w+)((?: -[\w-]+)*)(?: (.+?))?: (.+)")

ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="TOML file of the run.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=C", help="Override a setting; may be repeated."),
]
RunDirOption = Annotated[
    Path | None, typer.Option("--run-dir", metavar="DIR", help="Directory of the run.")
]


def is_number(text: str, least: int, most: int) -> bool:
    """True for plain decimal digits whose value is in the range."""
    return text.isascii() and text.isdigit() and len(text) <= 20 and least <= int(text) <= most


def parse_addresses(text: str) -> list[str]:
    """``host:port,host:port`` as a list. Raises BadInput."""
    addresses = [part.strip() for part in text.split(",") if part.strip()]
    for address in addresses:
        host, _, port = address.rpartition(":")
        is_path = address.startswith("unix:/")
        if not is_path and (not host or not is_number(port, 1, 65535)):
            raise BadInput(f"--controllers: {address} is not host:port or unix:/PATH")
    if not addresses:
        raise BadInput("--controllers: no address given; write host:port,host:port")
    return addresses


def write_new(out: Path, text: str, *, force: bool) -> None:
    """Writes a file of the user's, and replaces one only with ``force``. Raises BadInput."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        # Exclusive: a file that another process creates now is not replaced either.
        with out.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise BadInput(f"{out} exists: --force replaces it") from None


def run_config(run_dir: Path) -> Config:
    """The resolved configuration that ``paceline up`` left in the run directory."""
    path = run_dir / "config.toml"
    if not path.is_file():
        raise BadInput(f"--run-dir: {run_dir} has no config.toml: not a run directory")
    return load_config(path)


def run_addresses(run_dir: Path) -> list[str]:
    """gRPC addresses that the controllers of a run directory wrote. Raises BadInput for none."""
    found = written_by_controllers(run_dir, "address")
    if not found:
        raise BadInput(f"--run-dir: {run_dir}: no controller has been started there")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The controllers that a command's options name, and how to speak to them. Without a name, they
    are those of the run in ./runs.

    Args:
        controllers HOST:PORT,...: Addresses of the run's controllers.
        token_file FILE: File with the bearer token (or set PACELINE_TOKEN).
        tls_ca FILE: PEM root certificate of the controllers; turns TLS on.
    """

    run_dir: RunDirOption = None
    controllers: str | None = None
    token_file: Path | None = None
    tls_ca: Path | None = None

    def __post_init__(self) -> None:
        if self.run_dir is None and self.controllers is None:
            object.__setattr__(self, "run_dir", given_or_default(None))

    def addresses(self) -> list[str]:
        """Raises BadInput if the options name no controllers, or name them twice."""
        if (self.run_dir is None) == (self.controllers is None):
            raise BadInput("give either --run-dir DIR or --controllers HOST:PORT,...")
        if self.run_dir is not None:
            return run_addresses(self.run_dir)
        return parse_addresses(self.controllers or "")

    def auth(self) -> AuthConfig:
        """Settings of the run directory, if there are any, with what the options replace."""
        config = AuthConfig()
        if self.run_dir and (self.run_dir / "config.toml").is_file():
            config = run_config(self.run_dir).auth
        given = {"token_file": self.token_file, "tls_ca": self.tls_ca}
        return config.model_copy(
            update={name: str(value) for name, value in given.items() if value is not None}
        )

    def ask(self, work: Callable[[ControlPlane], Awaitable[T]]) -> T:
        """Runs ``work`` with a client. Raises Unreachable with how it ended if the run is over."""
        from paceline.rpc.client import ControlPlane, ControlPlaneUnavailable

        async def session() -> T:
            addresses = self.addresses()
            token, root = self._credentials()
            control = ControlPlane(addresses, token=token, tls_ca=root)
            try:
                return await work(control)
            finally:
                await control.close()

        if self.over:
            raise Unreachable(self.told_of_end())
        try:
            return asyncio.run(session())
        except (ControlPlaneUnavailable, BadInput):
            if told := self.told_of_end():
                raise Unreachable(told) from None
            raise

    def request(self, name: str, fields: Mapping[str, Any], method: str = "") -> Any:
        """The leader's reply to ``<name>Request``, which has an id of its own, so that a retry over
        a failover has one effect. Raises UserError if it is refused."""
        from paceline.rpc.client import RequestRefused
        from paceline.v1 import admin_pb2

        request = getattr(admin_pb2, f"{name}Request")(request_id=uuid.uuid4().hex, **fields)
        call = f"AdminService.{method or name}"
        try:
            return self.ask(lambda control: control.call(call, request, timeout_s=ANSWER_LIMIT_S))
        except RequestRefused as refusal:
            raise UserError(f"refused: {refusal.message}") from None

    @property
    def over(self) -> bool:
        """True if the run in ``run_dir`` has ended: its files answer for it."""
        from paceline.observe.runs import is_over

        return self.run_dir is not None and is_over(self.run_dir)

    def told_of_end(self) -> str:
        """How the run in ``run_dir`` ended, for a message; empty if nothing tells of an end."""
        from paceline.observe.runs import end_of

        told = end_of(self.run_dir) if self.run_dir is not None else ""
        why = f"the run in {self.run_dir} is not running: {told}. It can be read, and not steered"
        return f"{why}: paceline why says more" if told else ""

    def _credentials(self) -> tuple[str | None, Path | None]:
        from paceline.rpc.auth import client_root, read_token

        auth = self.auth()
        root = client_root(auth)
        try:
            if root is not None:
                ssl.create_default_context(cafile=root)
        except OSError as error:
            why = error.strerror or error
            raise BadInput(f"--tls-ca: {root} is no PEM file to be read: {why}") from error
        return read_token(auth, self.run_dir), root


def given_or_default(run_dir: Path | None) -> Path:
    """``run_dir``, or without it the run in ./runs that is running, or else the newest one, which
    is named on standard error. Raises BadInput."""
    from paceline.observe.runs import find_runs

    if run_dir is not None:
        return run_dir
    found = find_runs(Path("runs")) if Path("runs").is_dir() else []
    running = [run for run in found if run.state == "running"]
    if len(running) > 1:
        names = ", ".join(str(run.path) for run in running)
        raise BadInput(f"several runs are running ({names}): give --run-dir DIR")
    if not found:
        raise BadInput("no run in ./runs: give either --run-dir DIR or --controllers HOST:PORT,...")
    chosen = (running or found)[0].path
    typer.echo(f"run: {chosen}", err=True)
    return chosen


def print_json(value: Any, indent: int | None = 2) -> None:
    """``value`` on standard output, on one line without ``indent``; NaN and infinity, which JSON
    lacks, become null."""
    typer.echo(json.dumps(finite(value), indent=indent))


def command_line(command: Callable[..., None]) -> Callable[..., None]:
    """``command`` as typer reads it, with the first part of its docstring as its help."""
    text, described = _described(command)
    kinds: dict[str, Any] = {p.name: p.annotation for p in described if is_dataclass(p.annotation)}
    options = {name: _described(kind)[1] for name, kind in kinds.items()}
    parameters = [p for p in described if p.name not in kinds]
    parameters += [p for group in options.values() for p in group]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, kind in kinds.items():
            given[name] = kind(**{p.name: given.pop(p.name) for p in options[name]})
        command(**given)

    # typer reads all three.
    run.__doc__ = re.sub(r"(?<!\n)\n(?!\n)", " ", text)  # the terminal's width wraps paragraphs
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    )
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _described(command: Callable[..., Any]) -> tuple[str, list[inspect.Parameter]]:
    """Help and parameters of a command, or of a dataclass whose fields are options."""
    text, _, lines = (inspect.getdoc(command) or "").partition("\n\nArgs:\n")
    entries: dict[str, tuple[str, str, str]] = {}
    for line in re.sub(r"\n {8,}", " ", lines).splitlines():
        if found := ENTRY.fullmatch(line.strip()):
            entries[found[1]] = found[2], found[3], found[4]
    parameters = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if (entry := entries.pop(parameter.name, None)) is not None:
            parameter = parameter.replace(annotation=_annotated(parameter, *entry))
        parameters.append(parameter)
    assert not entries, f"{command.__name__} has no parameters {', '.join(entries)}"
    return text, parameters


def _annotated(parameter: inspect.Parameter, flags: str, metavar: str, text: str) -> Any:
    kind, *given = get_args(parameter.annotation) or (parameter.annotation,)
    if not given or not isinstance(given[0], ParameterInfo):
        kind, given = parameter.annotation, []
    is_option = parameter.kind is inspect.Parameter.KEYWORD_ONLY
    info = copy.copy(given[0]) if given else typer.Option() if is_option else typer.Argument()
    info.help = text
    info.metavar = metavar or info.metavar
    if is_option:
        info.default = ...  # typer takes a first flag for it
        info.param_decls = flags.split() or [f"--{parameter.name.replace('_', '-')}"]
    return Annotated[kind, info]
