// "What is running": the plan and the memory once, figures and plots each second while somebody looks or an answer runs.

import { getJson, getText } from "/web/api.js";
import { $, h } from "/web/dom.js";
import { mean, parse, quantile, rate } from "/web/metrics.js";
import { memoryBar, planTable } from "/web/plan.js";
import { Plot } from "/web/plot.js";

const EVERY_MS = 1000;
const WINDOW = 5; // readings that a latency is taken over: one second alone may hold no token

const count = (value) => (value >= 10_000 ? `${Number((value / 1000).toPrecision(3))}k` : value >= 100 || value === 0 ? String(Math.round(value)) : String(Number(value.toPrecision(3))));
const TILES = {
  rate: ["Generating", "tok/s"],
  requests: ["Requests", "running"],
  kv: ["KV cache", "in use"],
  first: ["First token", "median"],
  prefix: ["Prefix cache", "hits"],
};

export class Running {
  constructor({ onError }) {
    this.onError = onError;
    this.open = false;
    this.busy = false;
    this.readings = [];
    this.timer = null;
    this.tiles = Object.fromEntries(Object.keys(TILES).map((name) => [name, h("strong", {}, "–")]));
    $("tiles").append(...Object.entries(TILES).map(([name, [title, unit]]) => h("div", {}, h("dt", {}, title), h("dd", {}, this.tiles[name], " ", h("span", {}, unit)))));
    const plot = (title, unit, least, ...series) => new Plot({ title, unit, least, series, format: count });
    this.plots = {
      rate: plot("Throughput", "tok/s", 10, { name: "generated", class: "c1", area: true }, { name: "prompt", class: "c2" }),
      gap: plot("Between tokens", "ms", 1, { name: "mean", class: "c1", area: true }, { name: "95 of 100", class: "c2" }),
      first: plot("First token", "ms", 10, { name: "median", class: "c1", area: true }, { name: "95 of 100", class: "c2" }),
      requests: plot("Requests", "", 4, { name: "running", class: "c1", area: true }, { name: "waiting", class: "c2" }),
    };
    $("plots").append(...Object.values(this.plots).map((each) => each.element));
    document.addEventListener("visibilitychange", () => this.schedule());
  }

  setOpen(open) {
    this.open = open;
    this.schedule();
  }

  setBusy(busy) {
    this.busy = busy;
    this.schedule();
  }

  schedule() {
    const wanted = (this.open || this.busy) && document.visibilityState === "visible";
    if (wanted && this.timer === null) this.timer = setTimeout(() => this.read(), 0);
    if (!wanted && this.timer !== null) {
      clearTimeout(this.timer);
      this.timer = null;
    }
  }

  async read() {
    let next = EVERY_MS;
    try {
      this.take(parse(await getText("/metrics")));
      $("running-banner").hidden = true;
    } catch (error) {
      $("running-banner").textContent = error.message;
      $("running-banner").hidden = false;
      if (error.status === 401) {
        this.onError(error);
        next = 5 * EVERY_MS;
      }
    }
    if (this.timer !== null) this.timer = setTimeout(() => this.read(), next);
  }

  take(now) {
    const last = this.readings.at(-1);
    // After a pause the last reading is no neighbour any more.
    if (last && now.at - last.at > 5 * EVERY_MS) {
      this.readings = [];
      for (const plot of Object.values(this.plots)) plot.add(now.at - 1, [null, null]);
    }
    const before = this.readings.at(-1);
    this.readings = [...this.readings, now].slice(-WINDOW - 1);
    const { values } = now;
    const running = values.num_requests_running ?? 0;
    const waiting = values.num_requests_waiting ?? 0;
    this.plots.requests.add(now.at, [running, waiting]);
    this.tiles.requests.textContent = waiting ? `${running} + ${waiting}` : String(running);
    this.tiles.kv.textContent = `${Number((100 * (values.kv_cache_usage_perc ?? 0)).toPrecision(2))} %`;
    const asked = values.prefix_cache_queries_total ?? 0;
    this.tiles.prefix.textContent = asked ? `${Math.round((100 * values.prefix_cache_hits_total) / asked)} %` : "–";
    if (!before) return;
    const generated = rate(before, now, "generation_tokens_total");
    this.plots.rate.add(now.at, [generated, rate(before, now, "prompt_tokens_total")]);
    this.tiles.rate.textContent = generated === null ? "–" : count(generated);
    const [oldest] = this.readings;
    const ms = (value) => (value === null ? null : value * 1000);
    const gap = "inter_token_latency_seconds";
    const first = "time_to_first_token_seconds";
    this.plots.gap.add(now.at, [ms(mean(oldest, now, gap)), ms(quantile(oldest, now, gap, 0.95))]);
    this.plots.first.add(now.at, [ms(quantile(oldest, now, first, 0.5)), ms(quantile(oldest, now, first, 0.95))]);
    const none = { values: {}, histograms: {} };
    const median = quantile(none, now, first, 0.5);
    this.tiles.first.textContent = median === null ? "–" : `${count(median * 1000)} ms`;
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
    $("running-lead").textContent = `${plan.model}${where}, with up to ${plan.max_model_len.toLocaleString("en")} tokens a conversation.`;
    if (plan.decisions?.length) {
      $("plan-lead").textContent = "Which kernel runs each layer, by the number of tokens in a step. Open a layer to see why the others do not.";
      $("plan").replaceChildren(planTable(plan.decisions));
    } else {
      $("plan-lead").textContent = "This engine gives no reasons.";
      $("plan").replaceChildren(h("pre", { class: "plain-plan", tabindex: 0 }, plan.plan));
    }
    $("memory-card").hidden = !plan.memory;
    if (plan.memory) {
      const { lead, element } = memoryBar(plan.memory);
      $("memory-lead").textContent = lead;
      $("memory").replaceChildren(element);
    }
  }
}
