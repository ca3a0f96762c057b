"""The first minutes of a newcomer and the API's page, as a reader types them; ``make docs-commands`` runs the rest. And
the runner notices a page that lies."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.doc_commands import blocks
from support.run_commands import Reader, read_page, runnable

pytestmark = pytest.mark.nightly


@pytest.mark.slow
def test_the_page_of_the_api_does_what_it_says(tmp_path: Path) -> None:
    commands = sum(len(block.commands) if block.is_shell else 1 for block in runnable("docs/api.md"))
    assert commands >= 10
    assert read_page("docs/api.md", tmp_path) == commands


@pytest.mark.slow
def test_a_newcomer_serves_asks_and_chats(tmp_path: Path) -> None:
    """What README has for a machine without a GPU."""
    _, *without_gpu = (block for block in blocks("README.md") if block.is_shell)
    with Reader(tmp_path) as reader:
        for block in without_gpu:
            reader.run(block)
        assert reader.num_run == 5


def test_a_command_that_fails_is_noticed(tmp_path: Path) -> None:
    (block,) = blocks("page.md", "```console\n$ microscale dance\n```\n")
    with Reader(tmp_path) as reader, pytest.raises(AssertionError, match=r"page\.md:1: microscale dance"):
        reader.run(block)


def test_a_page_that_asks_without_a_server_is_noticed(tmp_path: Path) -> None:
    (block,) = blocks("page.md", "```console\n$ curl http://127.0.0.1:8000/health\n```\n")
    with Reader(tmp_path) as reader, pytest.raises(AssertionError, match="did not start"):
        reader.run(block)
