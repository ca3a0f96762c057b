"""The documentation site, built as ``make docs`` builds it, and what its pages refer to."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urldefrag

import pytest

from tools.docs.assemble import assemble

ROOT = Path(__file__).parents[2]
MKDOCS = ROOT / ".venv-docs/bin/mkdocs"
LOADED = {"script": "src", "img": "src", "source": "srcset", "iframe": "src", "link": "href"}


def build(folder: Path) -> Path:
    """The folder of the built site. A warning is an error."""
    if not MKDOCS.exists():
        pytest.skip("No MkDocs on this machine: `make test` and `make docs` install it in .venv-docs.")
    assemble(folder / "docs")
    config = folder / "mkdocs.yml"
    config.write_text(f"INHERIT: {ROOT / 'mkdocs.yml'}\ndocs_dir: {folder / 'docs'}\nsite_dir: {folder / 'site'}\n")
    done = subprocess.run(
        [MKDOCS, "build", "--strict", "--quiet", "--config-file", config],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stdout + done.stderr
    return folder / "site"


@dataclass
class Page(HTMLParser):
    """One built page: its anchors, where it leads to, and what it loads."""

    text: str
    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if found.get("id"):
            self.ids.add(str(found["id"]))
        if tag == "a" and found.get("href"):
            self.links.append(str(found["href"]))
        if tag in LOADED and found.get(LOADED[tag]) and found.get("rel") not in ("canonical", "next", "prev"):
            self.loads.append(str(found[LOADED[tag]]))


def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text()) for path in sorted(site.rglob("*.html"))}


def is_outside(target: str) -> bool:
    return target.startswith(("http:", "https:", "mailto:", "//"))


def broken(site: Path, found: dict[Path, Page]) -> list[str]:
    """Links to a file or an anchor that the site does not have."""
    wrong = []
    for path, page in found.items():
        if path.name == "404.html":  # its links begin at the site's address, wherever that is
            continue
        for link in page.links:
            if is_outside(link) or link.startswith("javascript:"):
                continue
            name, anchor = urldefrag(unquote(link))
            target = (path.parent / name).resolve() if name else path
            target = target / "index.html" if target.is_dir() else target
            # A hash alone is what the theme's own script listens to.
            if not target.exists() or (anchor and target in found and anchor not in found[target].ids | {"__top"}):
                wrong.append(f"{path.relative_to(site)}: {link}")
    return wrong


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def served(site: Path) -> Iterator[str]:
    """The address of a server of plain files on a free port."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(site))) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()
