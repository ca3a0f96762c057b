"""README, the recipes and the page of errors: short, with commands to copy, options that exist and messages that the
program prints."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml

from microscale.hardware import KNOWN
from support.doc_commands import ROOT, blocks, complaint, pages
from tools.docs.figures import BLOCK
from tools.docs.links import section
from tools.docs.reference import commands

RECIPES = [page for page in pages() if page.startswith("docs/recipes/")]
COPIED = ["README.md", "docs/troubleshooting.md", *RECIPES]
TROUBLESHOOTING = (ROOT / "docs/troubleshooting.md").read_text()
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]+")
OPTIONS = {name for _, command in commands() for each in command.params for name in (*each.opts, *each.secondary_opts)}
# Of other programs (pip, docker, sparkrun, claude), and one that `bench` reads itself.
FOREIGN = {"--serve", "--no-deps", "--gpus", "--env", "--strict", "--dry-run", "--model"}
GAP = "…"
"""Where a message has a name or a number."""


def cells(page: str) -> list[list[str]]:
    """The rows of the tables of a page."""
    lines = (ROOT / page).read_text().splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| ")]


def printed() -> str:
    """Every text in the source of the program, with a gap for what is filled in."""
    texts = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
            if isinstance(node, ast.JoinedStr):
                texts.append(
                    "".join(str(part.value) if isinstance(part, ast.Constant) else GAP for part in node.values)
                )
    return re.sub(rf"'?{GAP}'?", GAP, "\n".join(texts))


def test_the_quoted_messages_are_those_of_the_program() -> None:
    source = printed()
    quoted = [block.body.strip() for block in blocks("docs/troubleshooting.md") if block.language == "text"]
    assert len(quoted) >= 20
    assert not [message for message in quoted if message not in source]
    assert "is in GGUF, a message of no program" not in source


def test_there_are_twenty_errors() -> None:
    assert len(re.findall(r"(?m)^### ", TROUBLESHOOTING)) >= 20


@pytest.mark.parametrize("page", RECIPES)
def test_a_recipe_is_short_and_says_what_to_do_when_it_fails(page: str) -> None:
    text = (ROOT / page).read_text()
    assert 100 <= len(BLOCK.sub("", text).split()) <= 320
    assert {"What to expect", "If it fails"} <= set(re.findall(r"(?m)^## (.+)$", text))


@pytest.mark.parametrize("page", COPIED)
def test_commands_can_be_copied(page: str) -> None:
    for block in blocks(page):
        assert block.language != "console", f"{block.name}: a prompt would be copied too"
        starts = any(re.search(r"\bserve\b", command) for command in block.commands)
        assert not (starts and len(block.commands) > 1 and "curl" in block.body), f"{block.name}: serve does not return"


@pytest.mark.parametrize("page", COPIED)
def test_options_exist(page: str) -> None:
    theirs = {option for row in cells(page) for option in OPTION.findall(row[0])} if "/from_" in page else set()
    text = re.sub(r"(?s)^```.*?^```", "", (ROOT / page).read_text(), flags=re.MULTILINE)
    missing = re.findall(r"\*\*Missing:\*\*.*", text)
    named = {option for code in re.findall(r"`[^`]+`", text) for option in OPTION.findall(code)}
    assert named - OPTIONS - FOREIGN - theirs <= set(OPTION.findall(" ".join(missing)))


def test_options_of_vllm_that_are_the_same_are_ours_too() -> None:
    same = [row[0] for row in cells("docs/recipes/from_vllm.md") if row[1].startswith("the same")]
    assert len(OPTION.findall(" ".join(same))) > 20
    assert set(OPTION.findall(" ".join(same))) <= OPTIONS
    (missing,) = re.findall(r"\*\*Missing:\*\*.*", (ROOT / "docs/recipes/from_vllm.md").read_text())
    assert not set(OPTION.findall(missing)) & OPTIONS


def test_sparkrun_starts_a_command_that_exists() -> None:
    (path,) = (ROOT / "docs/recipes").glob("*.yaml")
    recipe = yaml.safe_load(path.read_text())
    command = recipe["command"].format(model=recipe["model"], **recipe["defaults"])
    assert complaint(command) is None
    assert recipe["container"] == "microscale"
    assert f"({path.name})" in (ROOT / "docs/recipes/dgx_spark.md").read_text()


def test_readme_proves_in_few_words() -> None:
    readme = (ROOT / "README.md").read_text()
    assert len(section(readme, "What was proved where").split()) <= 300
    assert (ROOT / "docs/pictures/chat.png").stat().st_size < 200_000
    assert "(docs/pictures/chat.png)" in readme
    assert f"for {len(KNOWN)} cards" in readme


@pytest.mark.parametrize(
    "path", [ROOT / page for page in [*pages(), "CHANGELOG.md", "packages/lab/README.md"]], ids=str
)
def test_no_page_names_a_package_that_is_not_published(path: Path) -> None:
    """Somebody else may own the name on PyPI. This test goes with the first release."""
    assert not re.search(r"pip install [^`\n]*\bmicroscale(?![-*/.])", path.read_text())
