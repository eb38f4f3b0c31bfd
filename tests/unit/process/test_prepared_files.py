"""What another user may have prepared for a run: refused by name, as ssh does; and tokens."""

import os
import stat
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.config.load import load_config
from paceline.config.sections.services import AuthConfig
from paceline.observe.fleet_file import FleetRecord, ProcessId
from paceline.process import files
from paceline.process.files import (
    NotOurs,
    check_ours,
    new_private_directory,
    private_directory,
    read_ours,
    without_links,
)
from paceline.rpc.auth import TOKEN_VARIABLE, AuthError, own_token, read_token
from paceline.rpc.grpc_channel import open_channel
from paceline_launcher.cli.common import run_addresses
from paceline_launcher.launch.job import read_job
from paceline_launcher.launch.run_dir import end_leftovers, locked
from testbed.fleets.controller_processes import write_config

NOBODY = 65534
TOKEN = "0123456789abcdef0123"
Spoil = Callable[[Path], None]


def given_away(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give a file to another user")
    os.chown(path, NOBODY, NOBODY)


def open_to_all(path: Path) -> None:
    path.chmod(path.stat().st_mode | stat.S_IWOTH)


def open_to_a_group(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can choose any group")
    os.chown(path, -1, NOBODY)
    path.chmod(path.stat().st_mode | stat.S_IWGRP)


def linked(path: Path) -> None:
    real = path.with_name(f"{path.name}.real")
    path.rename(real)
    path.symlink_to(real)


def link_of_another(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give a file to another user")
    linked(path)
    os.lchown(path, NOBODY, NOBODY)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run directory with all that is followed."""
    run_dir = tmp_path / "run"
    (run_dir / "controllers").mkdir(parents=True)
    (run_dir / "nodes").mkdir()
    run_dir.chmod(0o700)
    (run_dir / "token").write_text(TOKEN)
    (run_dir / "token").chmod(0o600)
    FleetRecord("r", ProcessId.of(os.getpid())).write(run_dir)
    (run_dir / "controllers" / "c.json").write_text('{"address": "127.0.0.1:1"}')
    (run_dir / "nodes" / "job.json").write_text("{}")
    return run_dir


FILES: dict[str, Callable[[Path], object]] = {
    "token": lambda run_dir: read_token(AuthConfig(), run_dir),
    "fleet.json": end_leftovers,
    "controllers/c.json": run_addresses,
    "nodes/job.json": read_job,
}


@pytest.mark.parametrize("spoil", [given_away, open_to_all, open_to_a_group, linked])
@pytest.mark.parametrize("name", FILES)
def test_a_file_of_a_run_that_another_may_have_written_is_refused(
    run_dir: Path, name: str, spoil: Spoil
) -> None:
    FILES[name](run_dir)
    spoil(run_dir / name)
    with pytest.raises(NotOurs, match=name):
        FILES[name](run_dir)


@pytest.mark.parametrize("spoil", [given_away, open_to_all, open_to_a_group, link_of_another])
def test_a_run_directory_that_another_may_have_prepared_is_refused(
    run_dir: Path, spoil: Spoil
) -> None:
    spoil(run_dir)
    for use in (
        new_private_directory,
        private_directory,
        own_token,
        lambda path: read_token(AuthConfig(), path),
        lambda path: locked(path).__enter__(),
    ):
        with pytest.raises(NotOurs, match=str(run_dir)):
            use(run_dir)
    assert (run_dir / "token").read_text() == TOKEN


def test_a_run_directory_that_every_user_can_replace_is_refused(run_dir: Path) -> None:
    above = run_dir.parent
    above.chmod(0o1777)
    assert own_token(run_dir) == TOKEN, "as in /tmp"
    above.chmod(0o777)
    with pytest.raises(NotOurs, match=f"{above} can be written"):
        own_token(run_dir)


@pytest.mark.parametrize("shared", [False, True])
def test_a_run_directory_below_one_of_another_user_is_refused(
    run_dir: Path, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They could put another one in its place, whatever its mode."""
    given_away(run_dir.parent)
    if shared:
        run_dir.parent.chmod(0o1777)
    with pytest.raises(NotOurs, match=f"{run_dir.parent} belongs to .* choose one below"):
        own_token(run_dir)
    monkeypatch.chdir(run_dir.parent)
    assert own_token(run_dir) == TOKEN, "their code runs anyway"


@pytest.mark.parametrize("middle", [False, True])
def test_a_run_directory_behind_a_link_of_another_user_is_refused(
    run_dir: Path, tmp_path: Path, middle: bool
) -> None:
    theirs, way = tmp_path / "theirs", tmp_path / "way"
    theirs.symlink_to(run_dir.parent)
    way.symlink_to(theirs)
    below = (way if middle else theirs) / run_dir.name
    assert own_token(below) == TOKEN
    if os.geteuid():
        pytest.skip("only root can give a link to another user")
    os.lchown(theirs, NOBODY, NOBODY)
    with pytest.raises(NotOurs, match=f"{theirs} is a symbolic link"):
        own_token(below)


def test_a_link_of_ones_own_to_a_directory_of_ones_own_is_followed(run_dir: Path) -> None:
    linked(run_dir)
    assert own_token(run_dir) == TOKEN


@pytest.mark.parametrize("spoil", [given_away, open_to_all, link_of_another])
def test_a_configuration_that_another_may_have_written_is_refused(
    tmp_path: Path, spoil: Spoil
) -> None:
    config = write_config(tmp_path)
    load_config(config)
    spoil(config)
    with pytest.raises(NotOurs, match=r"load\.toml"):
        load_config(config)


@pytest.mark.parametrize("spoil", [given_away, open_to_all])
def test_a_configured_token_file_that_another_may_have_written_is_refused(
    tmp_path: Path, spoil: Spoil
) -> None:
    secret = tmp_path / "secret"
    secret.write_text(TOKEN)
    (tmp_path / "link").symlink_to(secret)  # as Kubernetes mounts secrets
    auth = AuthConfig(token_file=str(tmp_path / "link"))
    assert read_token(auth) == TOKEN
    spoil(secret)
    with pytest.raises(NotOurs):
        read_token(auth)


def test_no_token_goes_to_a_socket_where_anyone_may_listen(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(NotOurs, match="closed to other users"):
        open_channel(f"unix:{tmp_path}/c.sock", TOKEN, tls_ca=None)


@pytest.mark.parametrize("spoil", [open_to_all, given_away])
def test_a_file_system_without_modes_or_with_one_owner_of_all_files_cannot_tell(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, spoil: Spoil
) -> None:
    spoil(run_dir)
    monkeypatch.setattr(files, "_new_file_in", lambda _: run_dir.stat())
    check_ours(run_dir)


def test_a_directory_that_narrows_the_modes_of_new_files_is_refused_as_any_other(
    run_dir: Path,
) -> None:
    read_only_for_its_owner = b"".join(
        struct.pack("<HHI", tag, rights, 0xFFFFFFFF)
        for tag, rights in ((0x01, 4), (0x04, 5), (0x20, 5))
    )
    try:
        os.setxattr(
            run_dir, "system.posix_acl_default", struct.pack("<I", 2) + read_only_for_its_owner
        )
    except OSError:
        pytest.skip("this file system has no access control lists")
    for name in ("token", "fleet.json"):
        given_away(run_dir / name)
        with pytest.raises(NotOurs, match=name):
            FILES[name](run_dir)
    given_away(run_dir)
    with pytest.raises(NotOurs, match="belongs to"):
        own_token(run_dir)


@pytest.mark.parametrize("token", ["short", "0123456789 abcdef0", "0123456789abcd\u00e9f0"])
def test_a_weak_token_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, token: str
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, token)
    with pytest.raises(AuthError, match=f"{TOKEN_VARIABLE} must be one line"):
        read_token(AuthConfig())
    monkeypatch.delenv(TOKEN_VARIABLE)
    (tmp_path / "token").write_text(token)
    with pytest.raises(AuthError, match="token_file"):
        read_token(AuthConfig(token_file=str(tmp_path / "token")))


def test_the_environment_overrides_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "0123456789abcdef")
    assert read_token(AuthConfig(token_file="/nowhere")) == "0123456789abcdef"


def test_a_token_that_cannot_be_put_into_its_place_leaves_no_secret_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: Path) -> None:
        raise PermissionError("this file system has no hard links")

    monkeypatch.setattr(os, "link", no_links)
    tmp_path.chmod(0o700)
    with pytest.raises(PermissionError):
        own_token(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_pipe_of_another_user_is_refused_before_it_is_opened(tmp_path: Path) -> None:
    pipe = tmp_path / "run.toml"
    os.mkfifo(pipe)
    given_away(pipe)
    for read in (read_ours, load_config):
        with pytest.raises(NotOurs, match="belongs to"):
            read(pipe)


@pytest.mark.parametrize("exists", [True, False])
def test_a_run_directory_that_another_user_chose_is_refused(tmp_path: Path, exists: bool) -> None:
    own, link = tmp_path / "own", tmp_path / "link"
    if exists:
        own.mkdir(mode=0o700)
    link.symlink_to(own)
    assert without_links(link) == own.resolve()
    if os.geteuid():
        pytest.skip("only root can give a link to another user")
    os.lchown(link, NOBODY, NOBODY)
    with pytest.raises(NotOurs, match="symbolic link"):
        without_links(link)
