"""What pages are made from: links adjusted for the site, options and routes from the code, figures from ``explain``."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from microscale.cli import COMMANDS
from microscale.explain import Question, explain
from microscale.planning.precision import make_precision
from microscale.server.web.openapi import BODIES, SUMMARIES
from support.doc_commands import ROOT, pages
from tools.docs import figures, plot, reference
from tools.docs.assemble import glossary
from tools.docs.links import anchors, for_site, in_prose, lists, section, slug
from tools.docs.reference import commands, flags, routes
from tools.lock import read

PUBLISHED = ROOT / "src/microscale/hardware/speeds_of_others.json"
DGX = "docs/recipes/dgx_spark.md"


def test_every_option_of_every_command_is_on_the_page() -> None:
    text = flags()
    assert {name.split()[0] for name, _ in commands()} == set(COMMANDS)
    for name, command in commands():
        (part,) = re.findall(rf"(?ms)^## microscale {name}$(.*?)(?=^## |\Z)", text)
        for parameter in command.params:
            if parameter.name != "help" and not getattr(parameter, "hidden", False):
                shown = parameter.name.upper() if parameter.param_type_name == "argument" else parameter.opts[-1]
                assert f"`{shown}`" in part, f"{name}: {shown}"
    assert "| `--port` | The port to listen on; 0 chooses a free one. Default: `8000`. |" in text
    assert "`--enable-prefix-caching`, `--no-enable-prefix-caching`" in text


def test_every_route_and_every_key_is_on_the_page() -> None:
    text = routes()
    for (method, path), says in SUMMARIES.items():
        assert f"`{method.upper()} {path}` | {says[:20]}" in text.replace("\\", "")
    for bodies in BODIES.values():
        for body in bodies:
            assert all(f"| `{name}` |" in text for name in body.model_json_schema()["properties"]), body
    assert "| `temperature` | number" in text


@pytest.mark.parametrize("page", reference.PAGES)
def test_the_reference_pages_are_what_the_code_says(page: str) -> None:
    text = (ROOT / page).read_text()
    assert reference.filled(page, text) == text, "the options or routes changed: run `make docs-reference`"


def test_a_reference_page_without_its_markers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"docs/flags\.md has no place for its tables"):
        reference.filled("docs/flags.md", "# Flags\n")


def test_the_site_is_assembled_without_microscale() -> None:
    """`make docs` runs this in an environment that has neither torch nor Microscale."""
    code = "import sys, tools.docs.assemble; sys.exit('microscale' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_glossary_is_the_architectures() -> None:
    assert "| **split-KV** |" in glossary()
    assert glossary().startswith("# Glossary\n")
    with pytest.raises(ValueError, match="no section 'Nothing'"):
        section("# A\n\n## B\n\ntext\n", "Nothing")


@pytest.mark.parametrize(
    ("source", "text", "moved"),
    [
        ("README.md", "[a](docs/proof.md#x)", "[a](proof.md#x)"),
        ("README.md", "![a](docs/plots/comparison.svg)", "![a](plots/comparison.svg)"),
        ("docs/using.md", "[a](../SECURITY.md)", "[a](security.md)"),
        (DGX, "[a](../../README.md#what-was-proved-where)", "[a](../index.md#what-was-proved-where)"),
        ("docs/lab/start.md", "[a](../using.md)", "[a](../using.md)"),
        ("docs/using.md", "[the unit](../packaging/microscale.service)", "the unit"),
        ("docs/using.md", "[a](https://example.org/x.md) [b](#here)", "[a](https://example.org/x.md) [b](#here)"),
        ("docs/using.md", "```sh\n[a](../SECURITY.md)\n```\n", "```sh\n[a](../SECURITY.md)\n```\n"),
    ],
)
def test_links_move_with_their_pages(source: str, text: str, moved: str) -> None:
    assert for_site(source, text) == moved


def test_lists_are_as_the_sites_markdown_wants_them() -> None:
    assert lists("Text:\n- a\n  b\n- c\n") == "Text:\n\n- a\n    b\n- c\n"
    assert lists("1. a\n   - b\n") == "1. a\n    - b\n"
    assert in_prose("```\nText:\n- a\n```\n", lists) == "```\nText:\n- a\n```\n"
    assert slug("20b prefill, `balanced` & more") == "20b-prefill-balanced--more"
    assert anchors("# A b\n```\n# c\n```\n## D-e\n") == {"a-b", "d-e"}


def test_pages_are_short() -> None:
    """Nobody reads a page of 2,500 words. Generated pages and the lab books are for looking things up."""
    generated = {"docs/kernels.md", "docs/flags.md", "docs/api.md"}
    lengths = {page: len((ROOT / page).read_text().split()) for page in pages() if page not in generated}
    assert not {page: length for page, length in lengths.items() if length > 2500}


@pytest.mark.parametrize("path", list(figures.pages()), ids=lambda path: path.stem)
def test_what_a_page_promises_of_a_card_is_what_explain_says(path: Path) -> None:
    text = path.read_text()
    assert figures.filled(text) == text, "explain says something else now: run `make docs-figures`"


def test_predictions_are_found_and_a_wrong_one_is_noticed() -> None:
    assert {path.stem for path in figures.pages()} >= {"README", "dgx_spark", "rtx_5090"}
    text = (ROOT / DGX).read_text()
    assert figures.filled(re.sub(r"\| gpt-oss-20b, `exact` \| .*", "| 999 |", text)) == text
    assert "does not fit" in figures.table("rtx5090", "gpt-oss-120b exact")
    assert figures.overview(["rtx4090"]).count("does not fit") == 2


def predicted(card: str, model: str, precision: str) -> float:
    report = explain(Question(model=model, gpu=card, precision=make_precision(precision, (), "auto", "auto")))
    return float(report.to_json()["predicted"]["decode_tok_s"])


def test_the_comparison_quotes_what_explain_says() -> None:
    text = " ".join((ROOT / "docs/comparison.md").read_text().split())
    spark, fast = (round(predicted("gb10", "gpt-oss-120b", precision)) for precision in ("exact", "fast"))
    assert f"we predict {spark} in `exact` and {fast} in `fast`" in text
    assert f"we predict {round(predicted('rtx5090', 'gpt-oss-20b', 'exact'))}." in text
    published = {(row["gpu"], row["model"], row["tok_s"]) for row in json.loads(PUBLISHED.read_text())}
    assert {("gb10", "gpt-oss-120b", 57.5), ("gb10", "gpt-oss-20b", 79.7)} <= published
    assert "57.5 tokens a second" in text


def test_readme_quotes_benchmarks() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    one, many = (plot.figures(plot.SOURCE.read_text(), group)[0] for group in plot.GROUPS[1:3])
    assert f"gpt-oss-120b decodes {one:.0f} tokens a second for one stream and {many:,.0f} for 64" in text


def test_the_page_of_errors_names_the_versions_that_are_locked() -> None:
    text = (ROOT / "docs/troubleshooting.md").read_text()
    cuda = {entry.name: entry.version for entry in read("cuda.txt")}
    assert f"the locked torch {cuda['torch']} is built for CUDA {cuda['cuda-toolkit'][:4]}," in text


def test_the_plot_is_of_the_figures_in_benchmarks() -> None:
    text = plot.SOURCE.read_text()
    assert plot.TARGET.read_text() == plot.drawn(text), "docs/benchmarks.md changed: run `make docs-figures`"
    assert plot.figures(text, plot.GROUPS[-1]) == [47500, 40900, 6900, 76000]
    with pytest.raises(ValueError, match="has no row"):
        plot.figures(text, plot.Group("x", "no such row"))
