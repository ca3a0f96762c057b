"""Two network namespaces with a slow or lossy link between them. Needs root, ``ip`` and TUN devices."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from support import two_machines
from support.child import as_process
from support.two_machines import ADDRESSES, Machine

TUN = Path("/dev/net/tun")
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
NO_NFT = "needs nft" if shutil.which("nft") is None else None


@dataclass(frozen=True)
class Link:
    """What forwards packets."""

    process: subprocess.Popen[bytes]
    file: Path

    def cut(self) -> None:
        """Nothing arrives any more, and no device says so."""
        self.process.send_signal(signal.SIGUSR1)

    def report(self) -> list[dict[str, float]]:
        """End it; what it did, each way."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)
        found: list[dict[str, float]] = json.loads(self.file.read_text())
        return found


def why_not() -> str | None:
    """Why there can be none here."""
    if not TUN.exists():
        return "this system has no TUN devices"
    reason = two_machines.why_not()
    if reason is not None:
        return reason
    try:
        os.close(_tun(f"mstry{os.getpid() % 10**6}"))
    except OSError as error:
        return f"no TUN device can be made: {error}"
    return None


@contextmanager
def slow_link(folder: Path, delay_ms: float, lose_every: int = 0) -> Iterator[tuple[Machine, Machine, Link]]:
    """``lose_every``: one packet in so many is lost, each way; 0: none."""
    names = [f"ms-slow-{os.getpid()}-{place}" for place in range(2)]
    devices = [f"ms{os.getpid() % 10**6}t{place}" for place in range(2)]
    files: list[int] = []
    made: list[str] = []
    process = None
    try:
        for place, (name, device) in enumerate(zip(names, devices, strict=True)):
            _ip("netns", "add", name)
            made.append(name)
            files.append(_tun(device))
            own, other = ADDRESSES[place], ADDRESSES[1 - place]
            _ip("link", "set", device, "netns", name)
            _ip("-n", name, "addr", "add", own, "peer", other, "dev", device)
            _ip("-n", name, "link", "set", device, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        report = folder / "link.json"
        asked = (*map(str, files), str(delay_ms), str(lose_every), str(report))
        process = subprocess.Popen(as_process("support.link_forwarder", *asked), pass_fds=files)
        first, second = (Machine(*each) for each in zip(names, devices, ADDRESSES, strict=True))
        yield first, second, Link(process, report)
    finally:
        if process is not None:
            process.kill()
            process.wait()
        for file in files:
            os.close(file)
        for name in made:
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "del", name)


def lose_by_nftables(machine: Machine, one_in: int) -> None:
    """One packet in so many that comes to this machine over its end of the link is lost."""
    rules = (
        "table inet lossy { chain input { type filter hook input priority 0; "
        f'iifname "{machine.device}" numgen inc mod {one_in} == 0 drop; }} }}'
    )
    subprocess.run(machine.command("nft", "-f", "-"), input=rules, text=True, check=True, capture_output=True)


def _tun(name: str) -> int:
    file = os.open(TUN, os.O_RDWR)
    try:
        fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    except OSError:
        os.close(file)
        raise
    os.set_inheritable(file, True)
    return file


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
