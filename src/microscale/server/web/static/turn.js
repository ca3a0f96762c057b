// How one turn of a conversation looks: a question with its files, or an answer with its reasoning, calls and figures.

import { duration } from "/web/answer.js";
import { $, copy, h, icon } from "/web/dom.js";
import { sentFile } from "/web/files.js";
import { Markdown } from "/web/markdown.js";

const number = new Intl.NumberFormat("en");

/** ‹ 1/2 ›: which version of a message is shown, and the way to the others; nothing where there is one. */
function versionSwitch(message, { versions, show }) {
  const all = versions(message);
  if (all.length < 2) return "";
  const at = all.indexOf(message);
  const button = (name, sign, step) =>
    h("button", { type: "button", class: "ghost small", "aria-label": name, title: name, onclick: () => show(all[(at + step + all.length) % all.length], name) }, sign);
  return h("span", { class: "versions", role: "group", "aria-label": "Versions of this message" },
    button("Previous version", "‹", -1), h("span", { "aria-label": `Version ${at + 1} of ${all.length}`, role: "img" }, `${at + 1}/${all.length}`), button("Next version", "›", 1));
}

/** A question. */
export class UserTurn {
  constructor(message, actions) {
    this.message = message;
    const edit = h("button", { type: "button", class: "ghost small edit", "aria-label": "Edit this message", title: "Edit", onclick: () => actions.edit(message) }, icon("edit"));
    this.element = h("article", { class: "turn user", "aria-label": "You" },
      (message.files ?? []).map(sentFile), message.content ? h("div", { class: "said" }, message.content) : "",
      h("div", { class: "line" }, versionSwitch(message, actions), edit));
  }

  finish() {}
}

/** An answer. `update` draws what has come so far; `finish` adds the actions. */
export class ModelTurn {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.reasoning = h("div", { class: "prose" });
    this.summary = h("span", { class: "label" }, "Thinking");
    this.glimpse = h("span", { class: "glimpse", "aria-hidden": "true" });
    this.thoughts = h("details", { class: "thoughts", hidden: true },
      h("summary", {}, icon("chevron"), this.summary, this.glimpse), this.reasoning);
    this.waiting = h("div", { class: "waiting", role: "img", "aria-label": "Waiting for the first token" }, h("i"), h("i"), h("i"));
    this.content = h("div", { class: "prose answer" });
    this.calls = h("div", { class: "calls" });
    this.foot = h("footer", { class: "foot" });
    this.element = h("article", { class: "turn model", "aria-label": "Answer", "aria-busy": "true", tabindex: -1 },
      this.thoughts, this.waiting, this.content, this.calls, this.foot);
    this.drawn = { reasoning: new Markdown(this.reasoning), content: new Markdown(this.content) };
    this.shown = { reasoning: "", content: "", calls: "" };
  }

  update() {
    const { reasoning, content, calls } = this.message;
    this.waiting.hidden = Boolean(reasoning || content || calls.length || this.message.ended);
    if (reasoning && reasoning !== this.shown.reasoning) {
      this.thoughts.hidden = false;
      this.drawn.reasoning.update(reasoning);
      this.shown.reasoning = reasoning;
    }
    const thinking = Boolean(reasoning) && !content && !calls.length && !this.message.ended;
    this.thoughts.classList.toggle("live", thinking);
    this.summary.textContent = thinking ? "Thinking" : `Thought for ${duration(this.message.thought_ms ?? 0)}`;
    this.glimpse.textContent = thinking ? lastLine(reasoning) : "";
    if (content !== this.shown.content) {
      this.drawn.content.update(content);
      this.shown.content = content;
    }
    const said = JSON.stringify(calls);
    if (said !== this.shown.calls) {
      this.calls.replaceChildren(...calls.map((call) => callCard(call)));
      this.shown.calls = said;
    }
  }

  /** `canAnswer`: the user may enter the results of the calls. */
  finish({ last, canAnswer }) {
    if (!this.message.ended) return;
    this.element.removeAttribute("aria-busy");
    this.update();
    const { message } = this;
    const notes = [];
    if (message.error) notes.push(note("bad", message.error));
    else if (message.stopped) notes.push(note("", "Stopped."));
    else if (message.finish === "length") notes.push(note("", "The answer was cut off at the maximum number of tokens."));
    else if (!message.content && !message.calls.length) notes.push(note("", "The model ended its turn without an answer."));
    if (message.flaws?.length) notes.push(note("", `The model's output was malformed (${message.flaws.join(", ")}); all of its text is shown.`));
    const copyButton = h("button", { type: "button", class: "ghost small", "aria-label": "Copy the answer", title: "Copy", onclick: () => copy(message.content, copyButton) }, icon("copy"));
    const retry = message.error
      ? h("button", { type: "button", class: "ghost labelled", onclick: this.actions.retry }, icon("retry"), "Try again")
      : h("button", { type: "button", class: "ghost small", "aria-label": "Try again", title: "Try again", onclick: this.actions.retry }, icon("retry"));
    this.foot.replaceChildren(...notes,
      h("div", { class: "line" }, versionSwitch(message, this.actions), message.content ? copyButton : "", last ? retry : "", h("span", { class: "figures" }, figures(message))));
    if (canAnswer) this.calls.replaceChildren(...message.calls.map((call) => callCard(call, this.actions.answer)));
    else for (const form of this.calls.querySelectorAll("form")) form.remove();
  }
}

const note = (kind, text) => h("p", { class: `note ${kind}`, role: kind === "bad" ? "alert" : null }, kind === "bad" ? icon("alert") : "", text);

/** The last words of the reasoning, while it is folded. */
function lastLine(text) {
  return text.slice(-240).trimEnd().split("\n").at(-1).slice(-120);
}

function figures(message) {
  const parts = [];
  if (message.tokens) parts.push(`${number.format(message.tokens)} ${message.tokens === 1 ? "token" : "tokens"}`);
  if (message.rate) parts.push(`${message.rate.toFixed(message.rate < 10 ? 1 : 0)} tok/s`);
  if (message.first_ms !== undefined) parts.push(`first token after ${duration(message.first_ms)}`);
  return parts.join(" · ");
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // incomplete, or not JSON
  }
}

/** One call: its name, its arguments, and a place for the result while that is awaited. */
function callCard(call, onResult = null) {
  const card = h("section", { class: "call", "aria-label": `Call of ${call.name}` },
    h("header", {}, icon("tool"), h("code", {}, call.name), h("span", { class: "tag" }, call.result === undefined ? "calls" : "called")),
    h("pre", { tabindex: 0 }, pretty(call.arguments) || "…"));
  if (call.result !== undefined) card.append(h("pre", { class: "result", tabindex: 0, "aria-label": "Result" }, call.result));
  else if (onResult) {
    const id = `result-${call.id}`;
    const field = h("textarea", { id, rows: 2, placeholder: "What the function returns", class: "mono", spellcheck: "false" });
    const send = (event) => {
      event.preventDefault();
      onResult(call, field.value);
    };
    card.append(h("form", { onsubmit: send }, h("label", { for: id }, "Result"), field, h("button", { type: "submit", class: "solid" }, "Return it")));
  }
  return card;
}

/** Scrolls with new text while the reader is at the end; elsewhere nothing moves. */
export class Follower {
  constructor() {
    this.box = $("scroll");
    this.button = $("to-end");
    this.following = true;
    this.box.addEventListener("scroll", () => {
      this.following = this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight < 48;
      this.button.hidden = this.following;
    });
    this.button.addEventListener("click", () => this.toEnd());
  }

  toEnd() {
    this.following = true;
    this.box.scrollTop = this.box.scrollHeight;
  }

  moved() {
    if (this.following) this.box.scrollTop = this.box.scrollHeight;
  }
}
