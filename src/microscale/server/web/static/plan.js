// The plan: for each kind of layer, which kernel runs it at which batch size, and why the others do not.

import { h } from "/web/dom.js";

const NAMES = {
  qkv: "Queries, keys, values", o: "Attention output", experts: "Experts", lm_head: "Vocabulary", embed: "Embedding",
  sliding_attention: "Attention, sliding", full_attention: "Attention, full", small: "Norms, rope, router", sampling: "Sampling",
};
const HUES = 8; // colours that running.css has

const micro = (us) => (us < 1000 ? `${Number(us.toPrecision(3))} µs` : `${Number((us / 1000).toPrecision(3))} ms`);

/** A colour for each kernel, by the order in which they appear; the reference is grey. */
function colours(decisions) {
  const names = [...new Set(decisions.map((decision) => decision.chosen))].filter((name) => name !== "reference");
  return (name) => (name === "reference" ? "k-ref" : `k-${names.indexOf(name) % HUES}`);
}

function grouped(decisions) {
  const layers = new Map();
  for (const decision of decisions) {
    const key = `${decision.op} ${decision.layer}`;
    layers.set(key, [...(layers.get(key) ?? []), decision]);
  }
  return [...layers.values()];
}

/** Neighbouring batch sizes with the same kernel. */
function spans(decisions) {
  const out = [];
  let first = 1;
  for (const decision of decisions) {
    const last = out.at(-1);
    if (last?.chosen === decision.chosen) Object.assign(last, { to: decision.tokens, count: last.count + 1, slowest: decision });
    else out.push({ chosen: decision.chosen, from: first, to: decision.tokens, count: 1, fastest: decision, slowest: decision });
    first = decision.tokens + 1;
  }
  return out;
}

/** The kernels that do not run, and why. A reason that changes with the batch size is given for the smallest and the largest. */
function losers(decisions) {
  const reasons = new Map();
  for (const decision of decisions)
    for (const { name, reason } of decision.rejected) reasons.set(name, [...(reasons.get(name) ?? []), { reason, tokens: decision.tokens }]);
  return [...reasons].map(([name, told]) => {
    const different = told.filter((entry, i) => i === 0 || entry.reason !== told[i - 1].reason);
    const few = different.length > 2 ? [different[0], different.at(-1)] : different;
    const said = few.map(({ reason, tokens }) => (few.length > 1 || told.length < decisions.length ? `${reason} (at ${tokens})` : reason));
    return { name, reason: said.join("; ") };
  });
}

/** Which path of its kernel runs which batch sizes, by the kind of batch. Neighbours with the same path are one span. */
function pathSpans(decisions) {
  const forms = new Map();
  for (const { paths = [] } of decisions)
    for (const span of paths) {
      const same = forms.get(span.form) ?? [];
      forms.set(span.form, same);
      const last = same.at(-1);
      if (last?.path === span.path) last.last = span.last;
      else same.push({ ...span });
    }
  return [...forms];
}

/** The sizes of a span. The last one is valid for all larger batches too. */
function sizesOf(span, spans) {
  const number = (n) => n.toLocaleString("en");
  if (span === spans.at(-1)) return `${number(span.first)} and more`;
  return span.first === span.last ? number(span.first) : `${number(span.first)} to ${number(span.last)}`;
}

/** A table of the paths, with the reasons against the others under each. A kernel with one path has no table. */
function pathTable(decisions) {
  const forms = pathSpans(decisions);
  if (!forms.some(([, spans]) => spans.some((span) => span.rejected.length))) return "";
  const row = (form, span, spans) => h("tr", {}, h("th", { scope: "row" }, `${form} ${sizesOf(span, spans)}`.trim()),
    h("td", {}, span.path ?? "separate kernels for each op", span.rejected.length
      ? h("details", {}, h("summary", {}, "Why not the others"), h("ul", {}, span.rejected.map(({ name, reason }) => h("li", {}, `${name}: ${reason}`)))) : ""));
  return h("table", { class: "paths" }, h("caption", {}, "Paths by tokens in a batch"),
    h("tbody", {}, forms.flatMap(([form, spans]) => spans.map((span) => row(form, span, spans)))));
}

export function planTable(decisions) {
  const colour = colours(decisions);
  const layers = grouped(decisions);
  const sizes = layers[0].map((decision) => decision.tokens);
  const axis = h("div", { class: "layer axis", "aria-hidden": "true" }, h("span", {}, "Layer"), h("span", {}, "Format"),
    h("span", { class: "band" }, sizes.map((size) => h("span", {}, size.toLocaleString("en")))), h("span", { class: "us" }, "Predicted"));
  return h("div", { class: "plan" }, axis, layers.map((layer) => layerRow(layer, colour)));
}

function layerRow(decisions, colour) {
  const parts = spans(decisions);
  const [first] = decisions;
  const band = h("span", { class: "band" }, parts.map((part) => {
    const cell = h("span", { class: `kernel ${colour(part.chosen)}`, title: `${part.chosen}, ${part.from} to ${part.to} tokens` }, part.chosen);
    cell.style.gridColumn = `span ${part.count}`;
    return cell;
  }));
  const chosen = parts.map((part) => h("p", {}, h("code", { class: colour(part.chosen) }, part.chosen),
    ` runs batches of ${part.from.toLocaleString("en")} to ${part.to.toLocaleString("en")} tokens. Predicted time per layer: ${micro(part.fastest.predicted_us)} to ${micro(part.slowest.predicted_us)}, ${part.fastest.tuned ? "based" : "not based"} on measurements on this GPU family.`));
  const others = losers(decisions);
  return h("details", { class: "layer-row" },
    h("summary", { class: "layer" }, h("span", { class: "name" }, NAMES[first.layer] ?? first.layer), h("span", { class: "format" }, first.format || "–"), band, h("span", { class: "us", title: "Predicted time per layer for one token" }, micro(first.predicted_us), h("span", { class: "only-phone" }, " predicted"))),
    h("div", { class: "reasons" }, chosen, pathTable(decisions), others.length ? h("table", {}, h("caption", {}, "Why not the others"), h("tbody", {}, others.map(({ name, reason }) => h("tr", {}, h("th", { scope: "row" }, h("code", {}, name)), h("td", {}, reason))))) : ""));
}

// ---- memory ---------------------------------------------------------------------------------------------------------

const size = (bytes) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = bytes < 1 ? 0 : Math.min(Math.floor(Math.log2(bytes) / 10), 4);
  return `${Number((bytes / 1024 ** power).toPrecision(3))} ${units[power]}`;
};

const WEIGHT_COLOURS = 7; // of those that running.css has; the KV cache and the rest have their own

/** A bar of what holds the memory, and its legend in the same order. */
export function memoryBar(memory) {
  const largestFirst = (parts) => parts.filter((part) => part.bytes > 0).sort((a, b) => b.bytes - a.bytes);
  const weights = largestFirst(Object.entries(memory.weights).map(([name, bytes]) => ({ name: NAMES[name] ?? name, bytes })));
  const parts = [
    ...weights.map((part, i) => ({ ...part, colour: i % WEIGHT_COLOURS })),
    ...largestFirst([
      { name: "KV cache, full", bytes: memory.kv_cache.full, colour: 7 },
      { name: "KV cache, sliding", bytes: memory.kv_cache.sliding, colour: 8 },
      { name: "States", bytes: memory.kv_cache.states, colour: 8 }, // a model has these or sliding layers
    ]),
    ...largestFirst([
      { name: "Runtime", bytes: memory.runtime, colour: 9 },
      { name: "Graphs", bytes: memory.graphs, colour: 10 },
      { name: "Activations", bytes: memory.activations, colour: 11 },
    ]),
  ];
  const used = parts.reduce((sum, part) => sum + part.bytes, 0);
  const free = Math.max(memory.usable - used, 0);
  const piece = (part, kind) => {
    const element = h("span", { class: kind, title: `${part.name}: ${size(part.bytes)}` });
    element.style.flexGrow = part.bytes;
    return element;
  };
  const bar = h("div", { class: "memory-bar", "aria-hidden": "true" }, parts.map((part) => piece(part, `m-${part.colour}`)), free ? piece({ name: "Free", bytes: free }, "free") : "");
  const entry = (part) => h("div", {}, h("dt", { class: `m-${part.colour}` }, part.name), h("dd", {}, size(part.bytes)));
  return {
    lead: `${size(used)} of ${size(memory.usable)} that may be used (${memory.usable_because}). The KV cache holds ${memory.full_positions.toLocaleString("en")} tokens.`,
    element: h("div", {}, bar, h("dl", { class: "memory-list" }, parts.map(entry))),
  };
}

/** What drafts, and when it is worth it, in a few sentences. */
export function draftsLead({ method, num_speculative_tokens: most, length, predicted }) {
  const lead = `Drafts come from ${method} and have up to ${most} tokens${length === "auto" ? ", as many as are worth their time" : ""}.`;
  const longest = predicted.filter(({ sequences, drafts }) => sequences === 1 && drafts <= 3).at(-1);
  if (!longest) return lead;
  const tokens = longest.drafts === 1 ? "1 draft token" : `${longest.drafts} draft tokens`;
  const worth = longest.pays_from_acceptance === null ? "That is never worth it." : `That is worth it if at least ${Math.round(100 * longest.pays_from_acceptance)} % of them are accepted.`;
  return `${lead} With ${tokens}, a step of one sequence is predicted to take ${longest.ratio.toFixed(2)} × as long. ${worth}`;
}
