// "What is running": the plan and the memory once, figures and plots every second while the view is open, and more often
// while an answer runs here, so that short ones are seen too.

import { getJson, getText } from "/web/api.js";
import { $, h } from "/web/dom.js";
import { mean, parse, quantile, rate } from "/web/metrics.js";
import { draftsLead, memoryBar, planTable } from "/web/plan.js";
import { Plot } from "/web/plot.js";

const EVERY_MS = 1000;
const BUSY_MS = 250;
const PATIENCE_MS = 5000; // a server that takes longer to tell its figures cannot be reached
const PAUSE_MS = 6000; // after this long the last reading is no neighbour any more
const WINDOW_MS = 5000; // that a latency is taken over: one reading alone may hold no token

const count = (value) => (value >= 10_000 ? `${Number((value / 1000).toPrecision(3))}k` : value >= 100 || value === 0 ? String(Math.round(value)) : String(Number(value.toPrecision(3))));
const TILES = {
  rate: ["Generating", "tok/s"],
  requests: ["Requests", "running"],
  kv: ["KV cache", "in use"],
  first: ["First token", "median"],
  prefix: ["Prefix cache", "hits"],
  drafts: ["Drafts", "accepted"], // where the server drafts
};

export class Running {
  constructor({ onError, onBack }) {
    this.onError = onError;
    this.onBack = onBack;
    this.open = false;
    this.busy = false;
    this.readings = [];
    this.timer = null;
    this.reading = false;
    this.owed = false; // a reading, even if the view is closed
    this.lost = false;
    this.tiles = Object.fromEntries(Object.keys(TILES).map((name) => [name, h("strong", {}, "–")]));
    this.draftsTitle = h("dt", {}, TILES.drafts[0]);
    const tile = ([name, [title, unit]]) => h("div", { class: `tile-${name}`, hidden: name === "drafts" }, name === "drafts" ? this.draftsTitle : h("dt", {}, title), h("dd", {}, this.tiles[name], " ", h("span", {}, unit)));
    $("tiles").append(...Object.entries(TILES).map(tile));
    const plot = (title, unit, least, ...series) => new Plot({ title, unit, least, series, format: count });
    this.plots = {
      rate: plot("Throughput", "tok/s", 10, { name: "generated", class: "c1", area: true }, { name: "prompt", class: "c2" }),
      gap: plot("Between tokens", "ms", 1, { name: "mean", class: "c1", area: true }, { name: "p95", class: "c2" }),
      first: plot("First token", "ms", 10, { name: "median", class: "c1", area: true }, { name: "p95", class: "c2" }),
      requests: plot("Requests", "", 4, { name: "running", class: "c1", area: true }, { name: "waiting", class: "c2" }),
    };
    $("plots").append(...Object.values(this.plots).map((each) => each.element));
    document.addEventListener("visibilitychange", () => this.schedule());
  }

  setOpen(open) {
    this.open = open;
    this.schedule();
  }

  /** An answer begins or ends here. Both are read, so that all of it is seen: the begin before the question is sent. */
  setBusy(busy) {
    if (busy === this.busy) return;
    this.busy = busy;
    this.owed = true;
    this.schedule();
  }

  schedule() {
    if (this.reading) return; // after which the next is set
    clearTimeout(this.timer);
    this.read();
  }

  get wanted() {
    return this.owed || ((this.open || this.busy) && document.visibilityState === "visible");
  }

  async read() {
    if (!this.wanted) return;
    this.owed = false;
    this.reading = true;
    let next = this.busy ? BUSY_MS : EVERY_MS;
    try {
      this.take(parse(await getText("/metrics", PATIENCE_MS)));
    } catch (error) {
      this.lose(error);
      if (error.status === 401) {
        this.onError(error);
        next = 5 * EVERY_MS;
      }
    }
    this.reading = false;
    if (this.wanted) this.timer = setTimeout(() => this.read(), next);
  }

  /** No figures: none are shown, rather than old ones. */
  lose(error) {
    this.lost = true;
    this.readings = [];
    for (const tile of Object.values(this.tiles)) tile.textContent = "–";
    for (const plot of Object.values(this.plots)) plot.lose(performance.now());
    const banner = $("running-banner");
    if (banner.textContent !== error.message) banner.textContent = error.message; // said once
    banner.hidden = false;
  }

  take(now) {
    if (this.lost) {
      // Perhaps another server, with another model.
      this.lost = false;
      $("running-banner").hidden = true;
      this.onBack();
    }
    if (now.at - (this.readings.at(-1)?.at ?? now.at) > PAUSE_MS) this.readings = [];
    const before = this.readings.at(-1);
    const recent = this.readings.findLastIndex((reading) => now.at - reading.at >= WINDOW_MS);
    this.readings = [...this.readings.slice(Math.max(recent, 0)), now];
    const { values } = now;
    const running = values.num_requests_running ?? 0;
    const waiting = values.num_requests_waiting ?? 0;
    this.tiles.requests.textContent = waiting ? `${running} + ${waiting}` : String(running);
    this.tiles.kv.textContent = `${Number((100 * (values.kv_cache_usage_perc ?? 0)).toPrecision(2))} %`;
    const asked = values.prefix_cache_queries_total ?? 0;
    this.tiles.prefix.textContent = asked ? `${Math.round((100 * values.prefix_cache_hits_total) / asked)} %` : "–";
    const first = "time_to_first_token_seconds";
    const median = quantile({ values: {}, histograms: {} }, now, first, 0.5);
    this.tiles.first.textContent = median === null ? "–" : `${count(median * 1000)} ms`;
    this.showDrafts(now);
    if (!before) return;
    const generated = rate(before, now, "generation_tokens_total");
    this.plots.requests.add(before.at, now.at, [running, waiting]);
    this.plots.rate.add(before.at, now.at, [generated, rate(before, now, "prompt_tokens_total")]);
    this.tiles.rate.textContent = generated === null ? "–" : count(generated);
    const [oldest] = this.readings;
    const ms = (value) => (value === null ? null : value * 1000);
    const gap = "inter_token_latency_seconds";
    this.plots.gap.add(before.at, now.at, [ms(mean(oldest, now, gap)), ms(quantile(oldest, now, gap, 0.95))]);
    this.plots.first.add(before.at, now.at, [ms(quantile(oldest, now, first, 0.5)), ms(quantile(oldest, now, first, 0.95))]);
  }

  /** How long drafts are now, and how many of their tokens were accepted: lately, or since the start where none were. */
  showDrafts(now) {
    const drafted = "spec_decode_num_draft_tokens_total";
    const drafts = drafted in now.values;
    $("tiles").classList.toggle("drafts", drafts);
    $("tiles").querySelector(".tile-drafts").hidden = !drafts;
    if (!drafts) return;
    const [oldest] = this.readings;
    const since = (name, start) => now.values[name] - (start?.values[name] ?? 0);
    const start = since(drafted, oldest) > 0 ? oldest : null;
    const count = since(drafted, start);
    this.tiles.drafts.textContent = count ? `${Math.round((100 * since("spec_decode_num_accepted_tokens_total", start)) / count)} %` : "–";
    this.draftsTitle.textContent = `Drafts of ${Number((now.values.spec_decode_draft_length ?? 0).toPrecision(2))} tokens`;
  }

  /** What stays as it is while the server runs. */
  async load() {
    let plan;
    try {
      plan = await getJson("/plan");
    } catch (error) {
      this.onError(error);
      return;
    }
    const where = plan.gpu ? ` on ${plan.gpu}, precision ${plan.precision}` : "";
    $("running-lead").textContent = `${plan.model}${where}, with up to ${plan.max_model_len.toLocaleString("en")} tokens per conversation.`;
    $("precisions-line").hidden = !plan.precisions_line;
    $("precisions-line").textContent = plan.precisions_line ?? "";
    if (plan.decisions?.length) {
      $("plan-lead").textContent = "Which kernel runs each layer, by the number of tokens in a step. Times are predicted, not measured: per layer, for one token. Open a layer to see why the other kernels do not run.";
      $("plan").replaceChildren(planTable(plan.decisions));
    } else {
      $("plan-lead").textContent = "This engine does not explain its plan.";
      $("plan").replaceChildren(h("pre", { class: "plain-plan", tabindex: 0 }, plan.plan));
    }
    $("drafts-card").hidden = !plan.speculative;
    if (plan.speculative) {
      $("drafts-lead").textContent = draftsLead(plan.speculative);
      $("drafts").replaceChildren(...(plan.speculative.decisions.length ? [planTable(plan.speculative.decisions)] : []));
    }
    $("memory-card").hidden = !plan.memory;
    if (plan.memory) {
      const { lead, element } = memoryBar(plan.memory);
      $("memory-lead").textContent = lead;
      $("memory").replaceChildren(element);
    }
  }
}
