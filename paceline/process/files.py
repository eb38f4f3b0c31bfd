"""Private files and directories, those that another user may have prepared, and the number of files
that a process may open."""

import errno
import grp
import os
import pwd
import resource
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from paceline.errors import BadInput


class NotOurs(BadInput):
    """Another user can have written it, so nothing in it may be followed. The message has the path
    and the remedy."""


def private_directory(path: Path) -> Path:
    """Makes ``path`` and its parents if missing; ``path`` is then closed to other users. Raises
    NotOurs."""
    new_private_directory(path).chmod(0o700)
    return path


def new_private_directory(path: Path) -> Path:
    """Makes ``path`` if missing, closed to other users. A directory that exists keeps its mode: its
    owner may let others read it, and the files in it are private anyway. Raises NotOurs."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    check_ours(path)
    return path


def check_ours(directory: Path) -> None:
    """Raises NotOurs if a user other than this one and root can have written in ``directory``, or
    can put another one in its place: the owner of a link on the way to it or of a directory above
    it, or every user. (A group whose members share the directory above it is trusted.) A file
    system without owners and modes, as some mounts are, cannot tell. Raises OSError if there is no
    such directory."""
    _judge_link(directory, 0)
    _judge(directory, directory.stat())
    trusted = (os.geteuid(), 0, _unmapped_user(), start_owner())
    for above in _way_to(directory.absolute()):
        _judge_link(above, start_owner())
        status = above.stat()
        if status.st_uid not in trusted and not _has_one_owner(above, status):
            raise NotOurs(
                f"{above} belongs to {_user(status.st_uid)}, who can put another directory in the "
                f"place of {directory}: choose one below directories of your own, or start there"
            )
        if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
            _judge(above, status, status.st_uid)


def _way_to(path: Path) -> Iterator[Path]:
    """``path``, the directories and links above it, and those that the links lead over."""
    for place in (path, *path.parents):
        yield place
        if place.is_symlink():
            yield from _way_to(place.parent / place.readlink())


def start_owner() -> int:
    """Owner of the directory where somebody starts Paceline, whose code runs anyway: in a
    container, root often works in a directory of the host's user."""
    try:
        return Path.cwd().stat().st_uid
    except FileNotFoundError:
        return 0  # it was removed


def _unmapped_user() -> int:
    """The number by which a user namespace shows every user that it does not map, root of the host
    among them; 0 outside of one."""
    try:
        ranges = Path("/proc/self/uid_map").read_text().splitlines()
        if sum(int(line.split()[2]) for line in ranges) < 2**32 - 1:
            return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except OSError:
        pass  # not Linux
    return 0


def without_links(directory: Path) -> Path:
    """``directory`` with its links followed. Raises NotOurs if another user has made the last one:
    they chose what it names, as a run of ours that would be continued or cleared."""
    if directory.is_symlink():
        _judge_link(directory, 0)
    return directory.resolve()


def others_can_replace(path: Path) -> bool:
    """True if a user other than this one and root can put something else in the place of ``path``,
    which may be missing: a directory above it is theirs, or they can write in it, and no sticky bit
    keeps them from what is there."""
    path = path.resolve()
    for directory in path.parents:
        try:
            status = directory.stat()
        except OSError:
            path = directory
            continue
        kept = status.st_mode & stat.S_ISVTX and path.exists()
        if status.st_uid not in (os.geteuid(), 0) or (_open_to_others(status) and not kept):
            return True
        path = directory
    return False


def read_ours(path: Path, *, linked: bool = False, trusted: int = 0) -> bytes:
    """Content of a file that no user but this one, root and ``trusted`` can have written.
    ``linked``: it may be a link of theirs, as those of Kubernetes' secrets. Raises NotOurs, and
    OSError if it cannot be read."""
    if linked:
        _judge_link(path, trusted)
    if path.is_fifo():
        _judge(path, path.stat(), trusted)  # opening one of another user's would wait for ever
    try:
        descriptor = os.open(path, os.O_RDONLY | (0 if linked else os.O_NOFOLLOW))
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotOurs(f"{path} is a symbolic link: {_REMEDY}") from None
        raise
    with os.fdopen(descriptor, "rb") as file:
        _judge(path, os.fstat(descriptor), trusted)
        return file.read()


_REMEDY = "it may be another user's trap. Remove it, or name one that is yours alone"


def _judge_link(path: Path, trusted: int) -> None:
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode) and status.st_uid not in (os.geteuid(), 0, trusted):
        raise NotOurs(f"{path} is a symbolic link of {_user(status.st_uid)}: {_REMEDY}")


def _judge(path: Path, status: os.stat_result, trusted: int = 0) -> None:
    home = path if stat.S_ISDIR(status.st_mode) else path.parent
    if status.st_uid not in (os.geteuid(), 0, trusted):
        if not _has_one_owner(home, status):
            raise NotOurs(
                f"{path} belongs to {_user(status.st_uid)}, and not to {_user(os.geteuid())}: "
                f"{_REMEDY}"
            )
    elif _open_to_others(status):
        made = _new_file_in(home)
        if made is None or not made.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise NotOurs(f"{path} can be written by other users: Run chmod go-w {path}")


def _has_one_owner(directory: Path, status: os.stat_result) -> bool:
    """True if new files of ours there get the very owner that is judged."""
    made = _new_file_in(directory)
    return made is not None and made.st_uid == status.st_uid


def _new_file_in(directory: Path) -> os.stat_result | None:
    """Owner and mode that a new file of ours, of mode 0600, gets in ``directory``; None if none can
    be made. Where it gets the very owner or the wide mode that is judged, those say nothing. It may
    well get a narrower mode: the default ACL of a directory, which is for its owner to choose."""
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".paceline-") as probe:
            return os.fstat(probe.fileno())
    except OSError:
        return None


def _open_to_others(status: os.stat_result) -> bool:
    by_group = status.st_mode & stat.S_IWGRP and not _is_private_group(status.st_gid)
    return bool(status.st_mode & stat.S_IWOTH or by_group)


def _is_private_group(number: int) -> bool:
    """True for a group that many systems make for each user, with that user alone in it."""
    try:
        group, user = grp.getgrgid(number), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def _user(number: int) -> str:
    try:
        return f"user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"user {number}"


def write_private(path: Path, text: str) -> None:
    """Writes a file of mode 0600; an existing one is closed to other users first."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "w") as file:
        os.fchmod(descriptor, 0o600)
        file.truncate()
        file.write(text)


MOST_FILES = 1 << 20  # containers may allow a billion, and some libraries walk through all of them
PRIVATE = 0o077


def set_process_limits() -> None:
    """Raises the soft limit of open files to the hard one, and makes new files private. Every
    connection is an open file. The usual soft limit of 1,024 is there for programs that call
    ``select``; a fleet of 1,000 workers, or a stranger with idle connections, would use it up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    # journal, prompts, samples and configuration: a usual umask would show them to every user.
    os.umask(os.umask(PRIVATE) | PRIVATE)


def open_files_limit() -> int:
    """Soft limit of open files of this process, at most ``MOST_FILES``."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_FILES if soft == resource.RLIM_INFINITY else min(soft, MOST_FILES)


def replace_file(path: Path, content: bytes) -> None:
    """Writes ``path`` at once or not at all: a full disk leaves what was there."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_bytes(content)
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


def write_durably(path: Path, data: bytes | str) -> None:
    """Writes ``data`` and syncs it; the name is durable after ``sync_directory``."""
    with path.open("wb") as stream:
        stream.write(data.encode() if isinstance(data, str) else data)
        stream.flush()
        os.fsync(stream.fileno())


def sync_directory(path: Path) -> None:
    """Makes the names in ``path`` durable."""
    sync_file(path, os.O_DIRECTORY)


def sync_file(path: Path, kind: int = 0) -> None:
    """Makes the content of ``path`` durable."""
    handle = os.open(path, os.O_RDONLY | kind)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_directory(path: Path) -> None:
    """Creates ``path`` and its parents, durably."""
    missing = [p for p in (path, *path.parents) if not p.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for created in missing:
        sync_directory(created.parent)
