"""Several hosts on one machine: network namespaces on a bridge, and partitions between any two.

Needs root and iproute2; ``why_not`` says what is missing. Everything is gone after ``close``.
"""

import os
import random
import shutil
import subprocess
from collections.abc import Sequence

HUB = "hub"
"""This machine itself, at the bridge."""
_NOBODY = "02:00:00:00:00:fe"
"""A hardware address that no host has."""


def why_not() -> str:
    """Empty if hosts can be made."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("nsenter") is None:
        return "network namespaces need ip (iproute2) and nsenter (util-linux)"
    made = subprocess.run(["ip", "netns", "add", f"plprobe{os.getpid()}"], capture_output=True)
    if made.returncode != 0:
        return f"no network namespaces here: {made.stderr.decode().strip()}"
    _ip("netns", "del", f"plprobe{os.getpid()}")
    return ""


class Hosts:
    """``address[name]`` of each host, and of the hub."""

    def __init__(self, *names: str) -> None:
        self._tag = f"{os.getpid() % 100000}"
        self._bridge = f"plbr{self._tag}"
        net = f"10.77.{random.randrange(1, 255)}"
        self.address = {HUB: f"{net}.1"}
        self._spaces: dict[str, str] = {}
        self._cables: dict[str, str] = {}
        _ip("link", "add", self._bridge, "type", "bridge")
        try:
            _ip("addr", "add", f"{net}.1/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
            for number, name in enumerate(names, 2):
                self._add(name, f"{net}.{number}", number)
        except BaseException:
            self.close()
            raise

    def _add(self, name: str, address: str, number: int) -> None:
        space, outside = f"pl{self._tag}-{name}", f"plv{self._tag}{number}"
        _ip("netns", "add", space)
        self._spaces[name], self.address[name] = space, address
        self._cables[name] = outside
        _ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("link", "set", outside, "master", self._bridge, "up")
        _ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", space, "link", "set", device, "up")

    def on(self, name: str, command: Sequence[str]) -> list[str]:
        """The command, run on that host: it becomes the very process that is started."""
        return ["nsenter", f"--net=/run/netns/{self._spaces[name]}", *command]

    def part(self, one: str, other: str) -> None:
        """What they send each other is lost, without a word to either."""
        self._lose(one, other)
        self._lose(other, one)

    def heal(self, one: str, other: str) -> None:
        for here, there in (one, other), (other, one):
            _ip(*self._neighbour(here, "del", there))

    def cut(self, name: str) -> None:
        """Pulls the host's cable."""
        _ip("link", "set", self._cables[name], "down")

    def mend(self, name: str) -> None:
        _ip("link", "set", self._cables[name], "up")

    def limit(self, name: str, mbit: int) -> None:
        """The host sends, and receives, at most that much, in Mbit/s. Raises OSError if the kernel
        has no tbf."""
        rate = ("tbf", "rate", f"{mbit}mbit", "burst", "1mb", "latency", "200ms")
        for device in (["dev", self._cables[name]], ["dev", "eth0"]):
            space = ["-n", self._spaces[name]] if device[1] == "eth0" else []
            done = subprocess.run(
                ["tc", *space, "qdisc", "replace", *device, "root", *rate],
                capture_output=True,
                text=True,
            )
            if done.returncode != 0:
                raise OSError(f"tc cannot limit {device[1]}: {done.stderr.strip()}")

    def _lose(self, here: str, there: str) -> None:
        found = ("lladdr", _NOBODY, "nud", "permanent")
        _ip(*self._neighbour(here, "replace", there), *found)

    def _neighbour(self, here: str, verb: str, there: str) -> list[str]:
        space = [] if here == HUB else ["-n", self._spaces[here]]
        device = self._bridge if here == HUB else "eth0"
        return [*space, "neigh", verb, self.address[there], "dev", device]

    def close(self) -> None:
        for space in self._spaces.values():
            subprocess.run(["ip", "netns", "del", space], check=False)
        subprocess.run(["ip", "link", "del", self._bridge], check=False)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
