"""Two network namespaces with a cable between them: two machines as far as sockets go. Needs root and ``ip netns``."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

ADDRESSES = ("10.213.7.1", "10.213.7.2")


@dataclass(frozen=True)
class Machine:
    """One of them."""

    name: str
    device: str
    """Its end of the cable."""
    address: str

    def command(self, *arguments: str) -> list[str]:
        """What runs ``arguments`` there."""
        return ["ip", "netns", "exec", self.name, *arguments]

    def pull_cable(self) -> None:
        _ip("-n", self.name, "link", "set", self.device, "down")


def why_not() -> str | None:
    """Why there can be none here."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "needs root and ip"
    name = f"ms-try-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return "this system makes no network namespaces"
    _ip("netns", "del", name)
    return None


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    names = [f"ms-{os.getpid()}-{place}" for place in range(2)]
    devices = [f"ms{os.getpid() % 10**6}v{place}" for place in range(2)]
    made: list[str] = []
    try:
        for name in names:
            _ip("netns", "add", name)
            made.append(name)
        _ip("link", "add", devices[0], "netns", names[0], "type", "veth", "peer", devices[1], "netns", names[1])
        for name, device, address in zip(names, devices, ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
            _ip("-n", name, "link", "set", device, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        first, second = (Machine(*each) for each in zip(names, devices, ADDRESSES, strict=True))
        yield first, second
    finally:
        for name in made:
            _ip("netns", "del", name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
