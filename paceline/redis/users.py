"""Users of the embedded Redis: what a controller and a worker may do with it.

    user        keys                  commands
    controller  paceline:*            data and scripts; INFO, WAIT, TIME
    worker      paceline:*:rdv:*      hashes and lists of a meeting: who is there, and where
    worker      paceline:*:payload:*  strings: writes and reads payloads, and deletes none

No user may run a command that concerns the server (CONFIG, SAVE, MODULE, DEBUG, SHUTDOWN,
REPLICAOF, FLUSHALL): with these, whoever learns a password could write files as the owner of the
run.
"""

import hashlib
import secrets
from pathlib import Path
from urllib.parse import quote

from paceline.process.files import write_private
from paceline.rpc.listeners import socket_path

CONTROLLER = "controller"
WORKER = "worker"

_CONNECTION = "+ping +hello +auth +select +quit +reset +client|setinfo +client|setname +client|id"
RULES = {
    CONTROLLER: (
        f"~paceline:* -@all {_CONNECTION} +@keyspace +@string +@hash +@list +@set +@sortedset "
        "+@stream +@transaction -@dangerous -@admin +eval +evalsha +script|load +script|exists "
        "+info +wait +waitaof +time"
    ),
    WORKER: (
        f"~paceline:*:rdv:* -@all {_CONNECTION} +@transaction +hset +hsetnx +hget +hmget +hgetall "
        "+hlen +rpush +blpop +expire (~paceline:*:payload:* -@all +mset +mget +strlen +exists)"
    ),
}


def acl_lines(home: Path) -> list[str]:
    """Lines of the server's configuration. Passwords are there only as digests."""
    lines = ["user default off"]
    for user, rules in RULES.items():
        digest = hashlib.sha256(password(home, user).encode()).hexdigest()
        lines.append(f"user {user} on #{digest} resetchannels {rules}")
    return lines


def password(home: Path, user: str) -> str:
    """Password of ``user``, from a private file that is written at the first call."""
    path = home / ("password" if user == CONTROLLER else f"password-{user}")
    if not path.exists():
        write_private(path, secrets.token_hex(24) + "\n")
    return path.read_text().strip()


def user_url(home: Path, user: str) -> str:
    """URL of the server's Unix socket for ``user``."""
    return f"unix://{user}:{password(home, user)}@{quote(str(server_socket(home)))}?db=0"


def server_socket(home: Path) -> Path:
    return socket_path(home.parent, "redis")
