"""Every command that a page shows is one that the command line takes, and says what it needs where it is not run."""

from __future__ import annotations

import pytest

from support.doc_commands import NEEDS, SHELL, UNMARKED, Block, blocks, complaint, nav, pages

# What a block may hold besides commands.
LANGUAGES = {*SHELL, "text", "python", "json", "toml", "ini", "yaml", "svg"}
# Programs that the runner of all commands knows how to start.
RUNS = ("microscale", ".venv/bin/microscale", "curl", "make serve")


@pytest.mark.parametrize("page", pages())
def test_the_command_line_takes_every_command(page: str) -> None:
    wrong = {
        f"{block.name}: {command}": said
        for block in blocks(page)
        if block.is_shell or not block.language
        for command in block.commands
        if (said := complaint(command)) is not None
    }
    assert not wrong


@pytest.mark.parametrize("page", [page for page in nav() if page not in UNMARKED])
def test_a_block_says_what_it_is_and_what_it_needs(page: str) -> None:
    for block in blocks(page):
        assert block.language in LANGUAGES, f"{block.name}: a fence without a language"
        assert block.needs <= NEEDS.keys(), f"{block.name}: {block.needs}"
        assert not block.needs or block.is_shell, f"{block.name}: not a block of commands"
        if block.is_shell and not block.needs:
            unknown = [command for command in block.commands if not command.startswith(RUNS)]
            assert not unknown, f"{block.name}: say above the fence what these need: <!-- needs: … -->"


def test_commands_are_found() -> None:
    text = """
<!-- needs: gpu, network -->
```console
$ microscale serve a \\
    --port 1   # says something
printed
$ curl x -d '{"a":
    1}'
```

```sh
# a comment
microscale doctor  # another
```

```text
microscale dance
```
"""
    first, second, third = blocks("page.md", text)
    assert first.commands == ["microscale serve a --port 1", "curl x -d '{\"a\": 1}'"]
    assert first.needs == {"gpu", "network"}
    assert (first.line, second.line) == (3, 11)
    assert second.commands == ["microscale doctor"]
    assert not third.is_shell


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("microscale serve openai/gpt-oss-20b --max-model-len 65536", None),
        (".venv/bin/microscale explain gpt-oss-20b --gpu gb10", None),
        ("MICROSCALE_OFFLINE=1 microscale bench gpt-oss-20b --serve --load-format dummy", None),
        ("microscale bench kernels moe --tokens 1,2 --record", None),
        ("docker run --gpus all microscale serve openai/gpt-oss-20b --host 0.0.0.0", None),
        ("make test-clients ARGS='--only codex'", None),
        ("cp a b", None),
        ("microscale dance", "no such command: dance"),
        ("microscale serve --no-such-option", "--no-such-option"),
        ("microscale serve --port nine", "--port"),
        ("microscale bench kernels moe --no-such-option", "--no-such-option"),
        ("docker run microscale serve --no-such-option", "--no-such-option"),
        ("make no-target", "no such target: no-target"),
    ],
)
def test_what_is_wrong_is_found(command: str, said: str | None) -> None:
    found = complaint(command)
    assert (found is None) == (said is None)
    assert said is None or said in str(found)


def test_there_are_blocks_of_both_kinds() -> None:
    found: list[Block] = [block for page in nav() for block in blocks(page) if block.is_shell]
    assert sum(len(block.commands) for block in found if not block.needs) > 20
    assert sum(len(block.commands) for block in found if block.needs) > 40
