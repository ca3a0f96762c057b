"""The web page's files as they are served: types, policy, caching, and that nothing is loaded from elsewhere."""

from __future__ import annotations

import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from microscale.server.web.pages import FOLDER, PAGES, add_pages

ROOT = Path(__file__).parents[3]


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
    assert "unsafe" not in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    again = client.get("/", headers={"If-None-Match": f'"other", W/{page.headers["etag"]}'})
    assert (again.status_code, again.content) == (304, b"")
    head = client.head("/")
    assert (head.status_code, head.headers["etag"]) == (200, page.headers["etag"])
    for path in ("/web/", "/web/../pages.py", "/web/nothing.js", "/web/%2e%2e/pages.py"):
        assert client.get(path).status_code == 404


def test_every_file_is_asked_for_and_packaged() -> None:
    texts = {file.name: file.read_text() for file in FOLDER.iterdir()}
    asked = set(re.findall(r"/web/([\w.]+)", "\n".join(texts.values()))) | {"index.html"}
    assert asked == set(texts)
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["microscale"]
    assert any(fnmatch("server/web/static/index.html", pattern) for pattern in data)
    assert len(PAGES) == len(texts)


@pytest.mark.parametrize("file", sorted(FOLDER.iterdir()), ids=lambda file: file.name)
def test_nothing_comes_from_elsewhere_and_no_text_becomes_markup(file: Path) -> None:
    text = file.read_text()
    addresses = set(re.findall(r"https?://[\w.]+", text)) - {"http://www.w3.org"}
    assert not addresses
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|srcdoc", text)
    assert not re.search(r"<\w[^>]* (style|on\w+)=", text)
