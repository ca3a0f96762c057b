"""The web page's files as they are served: types, policy, caching, and that nothing is loaded from elsewhere."""

from __future__ import annotations

import hashlib
import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from microscale.server.web.pages import FOLDER, PAGES, add_pages

ROOT = Path(__file__).parents[3]
OWN = sorted(file for file in FOLDER.iterdir() if file.is_file())
KATEX = FOLDER / "katex"
KATEX_FILES = "bc3fbb4cb9b75c60f928dda5267d311bad73efd243205c1b2130da6fed971898"
"""All files of KaTeX, hashed one after the other in the order of their paths."""


@pytest.fixture(scope="module")
def client() -> TestClient:
    app = FastAPI()
    add_pages(app)
    return TestClient(app)


def test_files_are_served_with_type_policy_and_tag(client: TestClient) -> None:
    page = client.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert client.get("/web/app.js").headers["content-type"] == "text/javascript; charset=utf-8"
    assert client.get("/web/icon.svg").headers["content-type"] == "image/svg+xml"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "font-src 'self'" in policy
    assert "unsafe" not in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    again = client.get("/", headers={"If-None-Match": f'"other", W/{page.headers["etag"]}'})
    assert (again.status_code, again.content) == (304, b"")
    head = client.head("/")
    assert (head.status_code, head.headers["etag"]) == (200, page.headers["etag"])
    for path in ("/web/", "/web/../pages.py", "/web/nothing.js", "/web/%2e%2e/pages.py"):
        assert client.get(path).status_code == 404


def test_every_file_is_used_and_packaged() -> None:
    texts = {file.name: file.read_text() for file in OWN}
    used = set(re.findall(r"/web/([\w./]+)", "\n".join(texts.values()))) | {"index.html"}
    assert used == set(texts) | {"katex/katex.min.js", "katex/katex.min.css"}
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["microscale"]
    every = [file for file in FOLDER.rglob("*") if file.is_file()]
    for file in every:
        name = file.relative_to(FOLDER.parents[2]).as_posix()
        assert any(fnmatch(name, pattern) for pattern in data), name
    assert len(PAGES) == len(every)


def test_katex_is_the_version_that_the_makefile_names(client: TestClient) -> None:
    """Unchanged, with every font that its styles use first, and with its licences."""
    names = set(re.findall(r"url\((fonts/[\w-]+\.woff2)\)", (KATEX / "katex.min.css").read_text()))
    assert {f"fonts/{file.name}" for file in (KATEX / "fonts").iterdir()} == names
    assert client.get(f"/web/katex/{min(names)}").headers["content-type"] == "font/woff2"
    version = re.search(r"^KATEX_VERSION := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert version is not None
    assert f'version:"{version[1]}"' in (KATEX / "katex.min.js").read_text()
    assert f"| {version[1]} |" in (ROOT / "THIRD_PARTY.md").read_text()
    digest = hashlib.sha256()
    for file in sorted(path for path in KATEX.rglob("*") if path.is_file()):
        digest.update(file.read_bytes())
    assert digest.hexdigest() == KATEX_FILES


@pytest.mark.parametrize("file", OWN, ids=lambda file: file.name)
def test_nothing_comes_from_elsewhere_and_no_text_becomes_markup(file: Path) -> None:
    text = file.read_text()
    addresses = set(re.findall(r"https?://[\w.]+", text)) - {"http://www.w3.org"}
    assert not addresses
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|srcdoc", text)
    assert not re.search(r"<\w[^>]* (style|on\w+)=", text)
