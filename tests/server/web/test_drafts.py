"""What the web page shows of a server that drafts: how much is accepted, how long drafts are, and when they pay."""

from __future__ import annotations

import json
import re

from playwright.sync_api import Page, Route, expect

from microscale.engine.loading.drafting import draft_costs
from microscale.engine.output import Stats
from microscale.engine.speculation.config import SpeculativeConfig
from microscale.engine.speculation.speculation import describe_drafts
from microscale.explain import Question, explain
from microscale.server.monitoring.metrics import Metrics
from support.live_server import SEEDS as PLAIN
from support.web_page import Open, keep_looks

pytest_plugins = ["support.web_fixtures"]


def stats(drafted: int, accepted: int, length: float) -> Stats:
    places = (accepted, 0, 0)
    return Stats(
        0, 1, 0, 0, 0, {}, num_drafts=drafted, num_draft_tokens=drafted, num_accepted_tokens=accepted,
        drafted_per_pos=(drafted, 0, 0), accepted_per_pos=places, draft_length=length,
    )  # fmt: skip


class Server:
    """Counts of a server that drafts: they stand still, and then of each 100 drafted tokens 90 are accepted."""

    drafted, accepted, length = 100, 40, 2.438
    runs = False

    def read(self) -> Stats:
        if self.runs:
            self.drafted, self.accepted, self.length = self.drafted + 100, self.accepted + 90, 2.9
        return stats(self.drafted, self.accepted, self.length)


def drafting(page: Page, server: Server) -> None:
    """The server's own replies, as one that drafts would give them."""
    metrics, report = Metrics("m"), explain(Question("gpt-oss-20b", "rtx5090"))
    costs = draft_costs(report.outline, report.plan, report.setup, on_device=False)
    told = describe_drafts(SpeculativeConfig("ngram", 3), costs, 64, report.plan)

    def show_metrics(route: Route) -> None:
        route.fulfill(content_type="text/plain", body=metrics.text(server.read()).decode())

    def show_plan(route: Route) -> None:
        reply = route.fetch()
        route.fulfill(response=reply, body=json.dumps({**reply.json(), "speculative": told}))

    page.route("**/metrics", show_metrics)
    page.route("**/plan", show_plan)


def test_a_server_that_drafts_shows_it(open_page: Open) -> None:
    with open_page(PLAIN["answer"]) as page:
        server = Server()
        drafting(page, server)
        page.reload()
        page.get_by_role("link", name="What is running").click()
        tile = page.locator(".tile-drafts")
        expect(tile).to_have_text(re.compile(r"Drafts of 2\.4 tokens\s*40 %\s*accepted"))
        expect(page.locator("#drafts-lead")).to_have_text(
            re.compile(
                r"Drafts come from ngram and have up to 3 tokens, as many as are worth their time\. "
                r"With 3 draft tokens, a step of one sequence is predicted to take \d\.\d\d . as long\. "
                r"That is worth it if at least \d\d % of them are accepted\."
            )
        )
        expect(page.locator("#drafts .layer-row").first).to_be_attached()  # the drafter's kernels
        server.runs = True
        expect(tile.locator("strong")).to_have_text("90 %")
        expect(tile).to_contain_text("Drafts of 2.9 tokens")
        page.evaluate("document.querySelector('#running .scroll').scrollTop = 0")
        keep_looks(page, "drafts")
        keep_looks(page, "drafts-plan", at="#drafts-card")


def test_a_server_that_does_not_says_nothing_of_it(open_page: Open) -> None:
    with open_page(PLAIN["answer"]) as page:
        page.get_by_role("link", name="What is running").click()
        expect(page.locator("#running-lead")).to_contain_text("precision exact")
        expect(page.locator("#tiles strong").first).to_be_visible()
        expect(page.locator(".tile-drafts")).to_be_hidden()
        expect(page.locator("#drafts-card")).to_be_hidden()
