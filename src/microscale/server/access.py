"""Who may call: API keys and origins as a user gives them, checked before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from microscale.errors import BadSetting


def read_keys(keys: list[str], file: Path | None) -> tuple[bytes, ...]:
    """The API keys of both options. A file without one would leave the server open, so it is refused."""
    found = list(keys)
    if file is not None:
        try:
            lines = [line.strip() for line in file.read_text().splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise BadSetting(f"--api-key-file {file} cannot be read: {error}.") from None
        found += [line for line in lines if line]
        if not any(lines):
            raise BadSetting(f"--api-key-file {file} holds no key; give one a line.")
    if not all(key.strip() and key.isascii() and key.isprintable() for key in found):
        raise BadSetting("An API key is empty or holds characters that no header can carry; use printable ASCII.")
    return tuple(key.strip().encode() for key in found)


def read_origins(origins: list[str], *, has_keys: bool) -> tuple[str, ...]:
    """The origins of ``--allowed-origin``. Without a key ``*`` would let every page of the web use the server."""
    for origin in origins:
        if origin == "*":
            if not has_keys:
                raise BadSetting("--allowed-origin '*' lets every web page call this server: set --api-key-file too.")
            continue
        parts = urlsplit(origin)
        if not parts.scheme or not parts.hostname or parts.path.strip("/") or parts.query or parts.fragment:
            raise BadSetting(f"--allowed-origin {origin!r} is no origin; give it as https://chat.example:8080.")
    return tuple(origins)
