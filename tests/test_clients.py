"""What `make test-clients` runs, as far as it needs no client: its table, its page and its recordings."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from compat import environments, report
from compat.report import Check, Result, Status
from compat.sanitise import Sanitiser
from compat.table import CLIENTS, Client, Kind

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "clients.md"
SCRIPTS = ROOT / "compat" / "scripts"


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_each_client_is_pinned_and_has_a_script(client: Client) -> None:
    assert (SCRIPTS / client.script).is_file()
    sign = "==" if client.kind is Kind.PYTHON else "@"
    for package in client.packages:
        assert re.search(rf".{sign}\d[\w.]*$", package), package


def test_the_page_tells_of_each_client_in_the_version_of_the_table() -> None:
    rows = re.findall(r"^\| ([\w-]+) \| (\d[\w.]*) \| ", PAGE.read_text(), re.MULTILINE)
    assert rows == [(client.name, client.version) for client in CLIENTS]


def result_of(client: Client, *, ok: bool) -> Result:
    checks = (Check("chat", ok=True), Check("tools | a b", ok=ok))
    return Result(client, Status.WORKS if ok else Status.FAILS, checks)


def test_a_run_of_one_client_changes_its_row_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{report.BEGIN}\n{report.END}\nafter\n")
    report.rewrite(page, [result_of(client, ok=True) for client in CLIENTS[:3]], CLIENTS)
    before = page.read_text()
    report.rewrite(page, [result_of(CLIENTS[1], ok=False)], CLIENTS)
    changed = [(a, b) for a, b in zip(before.splitlines(), page.read_text().splitlines(), strict=True) if a != b]
    assert [(a.split(" | ")[3], b.split(" | ")[3]) for a, b in changed] == [("works, 2 of 2", "fails: tools / a b")]
    assert page.read_text().startswith("before\n")
    assert page.read_text().endswith("\nafter\n")


def test_a_client_that_was_not_installed_is_no_pass() -> None:
    row = report.row(Result(CLIENTS[0], Status.NOT_INSTALLED, reason="no such version"))
    assert "| nothing | not installed: no such version |" in row


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        (
            "ERROR: Could not find a.\nERROR: No matching distribution found for x==9\n",
            "ERROR: No matching distribution found for x==9",
        ),
        (
            "npm error code ETARGET\nnpm error notarget No version x@9.\nnpm error log: /home/a/b.log",
            "npm error notarget No version x@9.",
        ),
        ("error: https://index.invalid/simple host='index.invalid' /home/me/x", "error: … … …"),
        ("killed", "no reason was given"),
    ],
)
def test_why_a_client_was_not_installed_names_no_machine(told: str, reason: str) -> None:
    assert environments._reason(told) == reason


def test_recordings_keep_keys_and_types_and_no_text() -> None:
    secret = "Sentences of the client's own that must not be kept, with a key sk-abc"
    body = {
        "model": "m",
        "instructions": secret,
        "stream": True,
        "tools": [{"type": "custom", "name": "f", "description": secret, "format": {"type": "grammar"}}],
        "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": secret}]}],
        "metadata": {"deep": json.dumps({"text": secret}), "n": 3, "none": None},
    }
    record = {"path": "/v1/responses", "headers": {"authorization": secret}, "body": body, "reply": {}}
    kept = Sanitiser().request(record, 0)
    assert "Sentences" not in json.dumps(kept)
    assert "sk-abc" not in json.dumps(kept)

    def shape(value: object) -> object:
        if isinstance(value, dict):
            return {key: shape(inner) for key, inner in value.items()}
        return [shape(inner) for inner in value] if isinstance(value, list) else type(value)

    assert shape(kept["body"]) == shape(body)
    assert kept["body"]["tools"][0]["type"] == "custom"
