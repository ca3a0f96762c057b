"""A folder as the root of a machine, for what an image's build runs where there is no builder.

The system's programs come from this machine, read-only; Python is at ``/usr/local``, as in the base image; all else is
the folder's own. Mounts are seen by the command alone. Needs root, for ``unshare`` and ``chroot``.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LINKS = ("bin", "sbin", "lib", "lib32", "lib64")
PIP_PATHS = re.compile(r"(?:file://)?(/[\w./+-]+)")


def possible() -> bool:
    """Whether this machine lets us mount in a namespace of our own."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode == 0


def pip_settings() -> dict[str, str]:
    """How this machine's pip finds packages, as the variables that an image's build would be given."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    found = dict(re.findall(r"(?m)^(?:global|:env:)\.([\w-]+)='(.*)'$", listed))
    wanted = ("index-url", "extra-index-url", "find-links", "cert", "trusted-host")
    return {f"PIP_{key.upper().replace('-', '_')}": value for key, value in found.items() if key in wanted}


@dataclass(frozen=True)
class PlainRoot:
    folder: Path

    def make(self) -> None:
        for name in ("usr", "proc", "dev", "tmp", "opt", "var", sys.base_prefix):
            (self.folder / name.lstrip("/")).mkdir(parents=True, exist_ok=True)
        (self.folder / "tmp").chmod(0o1777)
        for name in LINKS:
            if (Path("/") / name).is_symlink():
                (self.folder / name).symlink_to(os.readlink(f"/{name}"))
        # A copy, not the machine's own: a build adds users.
        subprocess.run(["cp", "-a", "/etc", str(self.folder / "etc")], check=True)

    def _mounts(self, *, read_only: bool, writable: Sequence[str]) -> list[str]:
        root = shlex.quote(str(self.folder))
        lines = [f"mount --bind {root} {root}"]
        if read_only:
            lines += [f"mount --bind {root}{path} {root}{path}" for path in writable]
            lines += [f"mount -o remount,bind,ro {root}", f"mount -t tmpfs tmpfs {root}/tmp"]
        lines += [f"mount --bind /usr {root}/usr", f"mount -o remount,bind,ro {root}/usr"]
        for path in self._python():
            lines += [
                f"mount --bind {shlex.quote(sys.base_prefix)} {root}{path}",
                f"mount -o remount,bind,ro {root}{path}",
            ]
        lines += [f"mount --rbind /proc {root}/proc", f"mount --rbind /dev {root}/dev"]
        if not read_only:
            lines += [f"mkdir -p {root}{path} && mount --bind {path} {root}{path}" for path in self._of_pip()]
        return lines

    def _python(self) -> list[str]:
        """Where this machine's Python is seen: as in the base image, and where its library is looked for."""
        return [] if sys.base_prefix == "/usr" else ["/usr/local", sys.base_prefix]

    def _of_pip(self) -> list[str]:
        """Folders of packages on this machine; an index's files may stand beside it."""
        paths = {Path(path) for value in pip_settings().values() for path in PIP_PATHS.findall(value)}
        tops = {Path(*path.parts[:3]) for path in paths if path.is_dir() and path.is_relative_to("/opt")}
        return sorted(map(str, tops))

    def command(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        folder: str = "/",
        user: str = "0:0",
        writable: Sequence[str] | None = None,
    ) -> list[str]:
        """What runs ``argv`` in there. With ``writable`` the root is read-only but for those folders and ``/tmp``."""
        lines = self._mounts(read_only=writable is not None, writable=writable or ())
        inside = f"cd {shlex.quote(folder)} && exec {shlex.join(argv)}"
        variables = shlex.join(f"{name}={value}" for name, value in env.items())
        there = f"chroot --userspec={user} --groups= {shlex.quote(str(self.folder))} /usr/bin/env -i {variables}"
        lines.append(f"exec {there} sh -c {shlex.quote(inside)}")
        return ["unshare", "--mount", "--propagation", "private", "sh", "-ec", "\n".join(lines)]
