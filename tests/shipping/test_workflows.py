"""What GitHub reads: workflows, issue forms, the citation; and release notes from the changelog."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from microscale.cli import COMMANDS
from microscale.version import __version__
from tools.release_notes import notes, version

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = {path.stem: path for path in sorted((GITHUB / "workflows").glob("*.yml"))}
FORMS = sorted(path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config")
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def load(path: Path) -> dict[Any, Any]:
    return yaml.safe_load(path.read_text())  # type: ignore[no-any-return]


def jobs(name: str) -> dict[str, Any]:
    return load(WORKFLOWS[name])["jobs"]  # type: ignore[no-any-return]


def steps(name: str) -> Iterator[dict[str, Any]]:
    for job in jobs(name).values():
        yield from job["steps"]


def test_these_are_all() -> None:
    assert set(WORKFLOWS) == {"check", "docs", "nightly", "release"}


@pytest.mark.parametrize("name", ["check", "docs", "nightly", "release"])
def test_a_workflow_may_little_and_ends(name: str) -> None:
    assert load(WORKFLOWS[name])["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] <= 180 for job in jobs(name).values())


@pytest.mark.parametrize("name", ["check", "docs", "nightly", "release"])
def test_steps_use_what_there_is(name: str) -> None:
    commands = [step["run"] for step in steps(name) if "run" in step]
    made = {
        target
        for command in commands
        for words in re.findall(r"\bmake ([a-z -]+)", command)
        for target in words.split()
    }
    assert made
    assert made <= TARGETS
    for step in steps(name):
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+)", step["uses"])


def test_both_machines_and_both_pythons_are_tested() -> None:
    matrix = jobs("check")["test"]["strategy"]["matrix"]
    assert matrix["runner"] == ["ubuntu-24.04", "ubuntu-24.04-arm"]
    assert matrix["python"][0] == "3.11"
    # .ci/run is what decides; GitHub runs no less.
    decides = re.findall(r"(?m)^(make .+)$", (ROOT / ".ci/run").read_text())
    assert decides
    assert set(decides) <= {step.get("run") for step in jobs("check")["test"]["steps"]}


def test_the_site_is_published_with_a_release_and_by_nothing_else() -> None:
    when = load(WORKFLOWS["docs"])[True]  # YAML takes the key `on` for a truth value
    assert set(when) == {"push", "workflow_dispatch"}
    assert when["push"] == {"tags": ["v*"]}
    may = {name: job["permissions"] for name, job in jobs("docs").items()}
    assert may == {
        "build": {"contents": "read", "pages": "read"},
        "publish": {"pages": "write", "id-token": "write"},
    }
    assert jobs("docs")["publish"]["needs"] == "build"


def test_no_file_names_where_packages_or_images_are_kept() -> None:
    files = [*WORKFLOWS.values(), *FORMS, ROOT / "compose.yaml", ROOT / "Dockerfile", ROOT / "Makefile"]
    for path in files:
        addresses = re.findall(r"\w+://([\w.-]+)", path.read_text())
        assert set(addresses) <= {"127.0.0.1", "microscale"}, path.name


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_asks_for_commands_that_exist(path: Path) -> None:
    form = load(path)
    assert form["name"]
    assert form["description"]
    text = path.read_text()
    assert set(re.findall(r"microscale ([a-z]+)", text)) <= set(COMMANDS)
    assert set(re.findall(r"`make ([a-z-]+)`", text)) <= TARGETS
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields)
    assert any(field.get("validations", {}).get("required") for field in fields)


def test_the_citation_is_of_this_version() -> None:
    cited = load(ROOT / "CITATION.cff")
    assert (cited["title"], cited["version"], cited["license"]) == ("Microscale", __version__, "MIT")


CHANGELOG = (
    "# Changelog\n\n## Unreleased\n\n- new\n\n## 0.2.0 (2027-01-01)\n\n- second\n\n## 0.1.0\n\n- first\n- also\n"
)


def test_release_notes_are_the_section_of_the_version() -> None:
    assert notes(CHANGELOG, "v0.2.0", "0.2.0") == "- second\n"
    assert notes(CHANGELOG, "v0.1.0", "0.1.0") == "- first\n- also\n"
    assert version() == __version__


@pytest.mark.parametrize(
    ("tag", "current", "said"),
    [
        ("v0.1.0", "0.2.0", "it should be v0.2.0"),
        ("v0.2", "0.2", "no section `## 0.2`"),
        ("v0.3.0", "0.3.0", "no section `## 0.3.0`"),
    ],
)
def test_a_release_that_does_not_agree_is_refused(tag: str, current: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        notes(CHANGELOG, tag, current)
