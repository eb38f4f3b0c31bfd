"""The embedded Redis is found, never doubled, and replaced when it dies; and its append-only file
after a power cut."""

import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from controller.store.journal import Journal, Position
from controller.store.redis_keys import Keys
from paceline.config.sections.services import RedisConfig
from paceline.redis.append_only_file import whole_commands
from paceline.redis.client import connect, connect_sync
from paceline.redis.server import NoRedis, RedisEndpoint, ensure_redis, find_server, stop_redis


def test_a_server_that_dies_while_it_is_waited_for_is_replaced(tmp_path: Path) -> None:
    """A process that was just killed still counts as running for an instant."""
    first = ensure_redis(tmp_path, RedisConfig())
    assert first.pid is not None
    second: list[RedisEndpoint] = []
    try:
        os.kill(first.pid, signal.SIGSTOP)  # it lives, and answers nobody
        waiter = threading.Thread(
            target=lambda: second.append(ensure_redis(tmp_path, RedisConfig()))
        )
        waiter.start()
        waiter.join(0.5)
        assert waiter.is_alive(), "a server that does not answer must be waited for, not doubled"
        os.kill(first.pid, signal.SIGKILL)
        waiter.join(60)
    finally:
        stop_redis(tmp_path)
    (found,) = second
    assert found.started and found.pid != first.pid
    assert found.url == first.url, "clients that only reconnect must find it"


def test_a_run_directory_may_have_any_name_and_be_named_relative_to_where_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = """with "quotes", \\ and \\n, and a space's ' end"""
    monkeypatch.chdir(tmp_path)
    try:
        endpoint = ensure_redis(Path(name), RedisConfig())
        assert endpoint.started
        assert not ensure_redis(tmp_path / name, RedisConfig()).started
        with connect_sync(endpoint.url) as client:
            assert client.ping()
        assert list((tmp_path / name / "redis" / "appendonlydir").iterdir())
    finally:
        stop_redis(tmp_path / name)


def slow_disk(directory: Path) -> Path:
    """A library that makes a process preloaded with it take long to sync a file."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to slow the disk down with")
    source = Path(__file__).parents[2] / "fakes" / "slow_sync.c"
    library = directory / "slow_sync.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    return library


async def test_what_was_appended_survives_a_kill_in_the_middle_of_a_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis puts writes off while it syncs its file, and answers them all the same."""
    monkeypatch.setenv("LD_PRELOAD", str(slow_disk(tmp_path)))
    first = ensure_redis(tmp_path, RedisConfig())
    monkeypatch.delenv("LD_PRELOAD")
    assert first.pid is not None
    keys = Keys("r")
    client = connect(first.url)
    try:
        await client.set(keys.term, "1")
        journal = Journal(client, keys)
        at = Position()

        async def append() -> Position:
            event = {"type": "x"}
            return await journal.append(at, term=1, batch=f"b{at.number}", t=1.0, events=[event])

        # A sync begins with one of the first writes, and what comes after is put off.
        while not (await client.info("persistence"))["aof_pending_bio_fsync"]:
            at = await append()
        at = await append()
        os.kill(first.pid, signal.SIGKILL)
        await client.aclose()
        again = ensure_redis(tmp_path, RedisConfig())
        client = connect(again.url)
        assert await Journal(client, keys).head() == at
    finally:
        await client.aclose()
        stop_redis(tmp_path)


KEYS = 200


@pytest.fixture
def newest(tmp_path: Path) -> Path:
    """The newest file of a server that has ended, with ``KEYS`` keys in it."""
    endpoint = ensure_redis(tmp_path, RedisConfig())
    with connect_sync(endpoint.url) as client:
        for number in range(KEYS):
            client.set(f"paceline:run:{number}", f"value {number}".encode() * 20)
    stop_redis(tmp_path)
    (file,) = (tmp_path / "redis" / "appendonlydir").glob("*.incr.aof")
    return file


def keys_left(run_dir: Path) -> tuple[int, str]:
    try:
        endpoint = ensure_redis(run_dir, RedisConfig())
        with connect_sync(endpoint.url) as client:
            return sum(1 for _ in client.scan_iter(match="paceline:run:*")), endpoint.healed
    finally:
        stop_redis(run_dir)


def zeroed(whole: bytes) -> bytes:
    return whole[:-3039] + bytes(3039)


def zeroes_behind(whole: bytes) -> bytes:
    return whole + bytes(4096)


def noise(whole: bytes) -> bytes:
    return whole[:-3039] + os.urandom(3039)


def no_text(whole: bytes) -> bytes:
    return whole + b"*2\r\n" + b"\xff" * 64


@pytest.mark.parametrize("torn", [zeroed, zeroes_behind, noise, no_text])
def test_a_torn_tail_is_cut_at_the_last_whole_command_and_kept(
    newest: Path, tmp_path: Path, torn: Callable[[bytes], bytes]
) -> None:
    whole = newest.read_bytes()
    damaged = torn(whole)
    newest.write_bytes(damaged)
    left, healed = keys_left(tmp_path)
    lost = 1 if torn in (zeroed, noise) else 0
    assert KEYS - 20 < left <= KEYS - lost
    (copy,) = newest.parent.glob("*.cut-at-*")
    at = int(re.search(r"(\d+)$", copy.name)[1])  # type: ignore[index]
    assert copy.read_bytes() == damaged[at:] and whole.startswith(damaged[:at])
    assert str(copy) in healed and "power cut" in healed
    again, healed = keys_left(tmp_path)
    assert again == left and not healed


def test_a_tail_that_is_only_short_needs_no_mending(newest: Path, tmp_path: Path) -> None:
    os.truncate(newest, newest.stat().st_size - 7)
    assert keys_left(tmp_path) == (KEYS - 1, "")


def test_damage_in_the_middle_is_refused_with_what_can_be_done(
    newest: Path, tmp_path: Path
) -> None:
    whole = bytearray(newest.read_bytes())
    middle = len(whole) // 2
    whole[middle : middle + 600] = bytes(600)
    newest.write_bytes(whole)
    with pytest.raises(NoRedis) as refused:
        keys_left(tmp_path)
    for words in (str(newest), "Nothing was changed", "--from", "truncate"):
        assert words in str(refused.value)
    assert newest.read_bytes() == whole
    assert not list(newest.parent.glob("*.cut-at-*"))


def command(*words: str) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(
        b"$%d\r\n%s\r\n" % (len(word), word.encode()) for word in words
    )


BEGUN = command("MULTI") + command("SET", "paceline:c", "d") + command("SET", "paceline:e", "f")


def test_a_transaction_without_its_end_is_no_whole_command(tmp_path: Path) -> None:
    file, first = tmp_path / "file.aof", command("SET", "a", "b")

    def whole(data: bytes) -> int:
        file.write_bytes(data)
        return whole_commands(file, find_server())

    assert whole(b"") == 0
    assert whole(first + BEGUN) == len(first)
    assert whole(first + BEGUN + command("EXEC")) == len(first + BEGUN + command("EXEC"))
    assert whole(b"#TS:1795712013\r\n" + first + b"*1\r\n$4\r\nPI") == 16 + len(first)


def test_a_transaction_that_was_torn_is_cut(newest: Path, tmp_path: Path) -> None:
    whole = newest.read_bytes()
    newest.write_bytes(whole + BEGUN + bytes(100))
    assert keys_left(tmp_path)[0] == KEYS
    (copy,) = newest.parent.glob("*.cut-at-*")
    assert copy.read_bytes() == BEGUN + bytes(100)
