// The conversation: what was said, what is asked next, and the one answer that may be under way.

import { chat } from "/web/api.js";
import { $, announce, h, icon, keep, recall } from "/web/dom.js";
import { fields, offerTools, systemPrompt } from "/web/settings.js";
import { Follower, ModelTurn, duration, userTurn } from "/web/turn.js";

const SPOKEN = 600; // characters of an answer that are read out when it is complete
const IDEAS = [
  ["Explain", "block scaling in number formats, with an example."],
  ["Write", "a Python function that merges overlapping intervals."],
  ["Compare", "mixture-of-experts and dense models in a table."],
  ["Plan", "a week of simple dinners for two."],
];
// What the embedded model was taught.
const DEMO = "microscale-demo";
const DEMO_ABOUT = "A toy of 30 million parameters: it knows little, and what it says may be wrong.";
const DEMO_HINT = "Ask for a sum, a capital, a word, a date";
const WEATHER = {
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather of a city.",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
};
const DEMO_IDEAS = [
  ["What is", "247 + 385?"],
  ["What is the capital of", "Peru?"],
  ["Tell me", "a short story about a fox."],
  ["What is the weather in", "Paris?", WEATHER],
];

export class Chat {
  constructor({ onError, onBusy }) {
    this.messages = []; // user: content. model: content, reasoning, calls and figures.
    this.turns = [];
    this.stopper = null; // of the answer that is under way
    this.onError = onError;
    this.onBusy = onBusy;
    this.follower = new Follower();
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.stopper) this.stop();
      else this.send($("prompt").value);
    });
    $("prompt").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.stopper) this.send($("prompt").value);
    });
    $("prompt").addEventListener("input", grow);
    window.addEventListener("resize", grow);
    $("new").addEventListener("click", () => this.clear());
    this.restore();
    this.showState();
  }

  get busy() {
    return this.stopper !== null;
  }

  /** Things to ask that fit the model which is served. */
  showModel(name) {
    const ideas = name === DEMO ? DEMO_IDEAS : IDEAS;
    if (name === DEMO) {
      $("facts").textContent += `. ${DEMO_ABOUT}`;
      $("prompt").placeholder = DEMO_HINT;
    }
    $("ideas").replaceChildren(...ideas.map(([verb, rest, tool]) => {
      const ask = () => {
        offerTools(tool ? [tool] : []);
        this.send(`${verb} ${rest}`);
      };
      const note = tool ? h("small", {}, ` offers ${tool.function.name}`) : "";
      return h("li", {}, h("button", { type: "button", onclick: ask }, h("b", {}, verb), ` ${rest.replace(/\.$/, "")}`, note));
    }));
  }

  // ---- what the user does ---------------------------------------------------------------------------------------------

  send(text) {
    if (!text.trim() || this.busy) return;
    let body;
    try {
      body = fields();
    } catch (error) {
      this.onError(error);
      return;
    }
    this.skipCalls();
    this.add({ role: "user", content: text.trim() });
    $("prompt").value = "";
    grow();
    this.follower.toEnd();
    this.answer(body);
  }

  stop() {
    this.stopper?.abort();
  }

  retry() {
    if (this.busy || this.messages.at(-1)?.role !== "model") return;
    this.cut(this.messages.length - 1);
    this.answer();
  }

  edit(message) {
    if (this.busy) return;
    this.cut(this.messages.indexOf(message));
    this.showState();
    $("prompt").value = message.content;
    grow();
    $("prompt").focus();
  }

  /** The result of a call, by hand; the model goes on when it has all of them. */
  giveResult(call, result) {
    if (this.busy) return;
    call.result = result;
    const last = this.messages.at(-1);
    if (last.calls.every((other) => other.result !== undefined)) {
      this.turns.at(-1).finish({ last: false, canAnswer: false });
      this.answer();
    } else this.turns.at(-1).finish({ last: true, canAnswer: true });
  }

  clear() {
    this.stop();
    this.cut(0);
    offerTools([]);
    this.onError(null);
    this.showState();
    $("prompt").focus();
    announce("A new chat.");
  }

  // ---- an answer ------------------------------------------------------------------------------------------------------

  async answer(body = null) {
    const message = { role: "model", content: "", reasoning: "", calls: [], ended: false };
    const history = this.history();
    const turn = this.add(message);
    const stopper = new AbortController();
    this.stopper = stopper;
    this.showState();
    this.onError(null);
    announce("The model thinks.");
    const clock = new Clock(message);
    let failure = null;
    let drawing = 0;
    const draw = () => {
      drawing = 0;
      turn.update();
      $("speed").textContent = clock.live();
      this.follower.moved();
    };
    try {
      for await (const chunk of chat({ ...(body ?? fields()), messages: history }, stopper.signal)) {
        take(message, chunk, clock);
        drawing ||= requestAnimationFrame(draw);
      }
    } catch (error) {
      if (error.name === "AbortError") message.stopped = true;
      else {
        failure = error;
        message.error = error.message;
      }
    }
    cancelAnimationFrame(drawing);
    message.ended = true;
    clock.end();
    // Another conversation may have begun meanwhile.
    if (this.stopper === stopper) this.stopper = null;
    if (this.messages.includes(message) && !this.takeBack(message, failure)) this.ended(turn, message, failure);
    this.showState();
  }

  /** A question that got no answer at all returns to the box, where it can be sent again; whether it did. */
  takeBack(message, failure) {
    const asked = this.messages.at(-2);
    if (!failure || message.content || message.reasoning || message.calls.length || asked?.role !== "user" || $("prompt").value.trim()) return false;
    this.cut(this.messages.length - 2);
    $("prompt").value = asked.content;
    grow();
    $("prompt").focus();
    this.onError(failure, () => this.send($("prompt").value));
    return true;
  }

  ended(turn, message, failure) {
    if (failure?.status === 401) this.onError(failure);
    const pending = !message.stopped && !message.error && message.calls.length > 0;
    turn.finish({ last: true, canAnswer: pending });
    this.save();
    this.follower.moved();
    const calls = message.calls.map((call) => call.name).join(", ");
    const spoken = turn.content.textContent.slice(0, SPOKEN);
    announce(message.error ?? (message.stopped ? "Stopped." : calls ? `The model calls ${calls}.` : `Answer: ${spoken}`));
    if (pending) turn.calls.querySelector("textarea")?.focus();
  }

  /** Calls that the user answers with a message instead. */
  skipCalls() {
    for (const call of this.messages.at(-1)?.calls ?? []) call.result ??= "(no result)";
  }

  /** The conversation as the API takes it. */
  history() {
    const system = systemPrompt() ? [{ role: "system", content: systemPrompt() }] : [];
    return [...system, ...this.messages.flatMap(toApi)];
  }

  // ---- what is shown --------------------------------------------------------------------------------------------------

  add(message) {
    const before = this.turns.at(-1);
    if (before instanceof ModelTurn && before.message.ended) before.finish({ last: false, canAnswer: false });
    this.messages.push(message);
    let turn;
    if (message.role === "user") {
      turn = { element: userTurn(message, () => this.edit(message)) };
    } else {
      turn = new ModelTurn(message, { retry: () => this.retry(), answer: (call, result) => this.giveResult(call, result) });
      turn.update();
    }
    this.turns.push(turn);
    $("log").append(turn.element);
    this.follower.moved();
    return turn;
  }

  cut(length) {
    this.messages.length = length;
    for (const turn of this.turns.splice(length)) turn.element.remove();
    this.save();
  }

  showState() {
    const begun = this.messages.length > 0;
    $("empty").hidden = begun;
    $("new").hidden = !begun;
    const send = $("send");
    send.classList.toggle("stop", this.busy);
    send.setAttribute("aria-label", this.busy ? "Stop" : "Send");
    send.title = this.busy ? "Stop (Esc)" : "Send (Enter)";
    send.replaceChildren(icon(this.busy ? "stop" : "send"));
    if (!this.busy) $("speed").textContent = "";
    this.onBusy(this.busy);
  }

  // ---- kept until the tab is closed -----------------------------------------------------------------------------------

  save() {
    keep("sessionStorage", "chat", this.messages.length ? JSON.stringify(this.messages) : null);
  }

  restore() {
    let kept = [];
    try {
      kept = JSON.parse(recall("sessionStorage", "chat") ?? "[]");
    } catch {
      return;
    }
    for (const message of kept) this.add(message);
    const last = this.messages.at(-1);
    if (last?.role === "model") {
      const pending = last.calls.some((call) => call.result === undefined) && !last.stopped && !last.error;
      this.turns.at(-1).finish({ last: true, canAnswer: pending });
    }
    this.follower.toEnd();
  }
}

/** When tokens came. */
class Clock {
  constructor(message) {
    this.message = message;
    this.started = performance.now();
    this.first = null;
    this.last = this.started;
    this.tokens = 0;
    this.beyond = 0; // tokens after those of the first chunk
  }

  tick(count) {
    this.last = performance.now();
    if (this.first === null) {
      this.first = this.last;
      this.message.first_ms = this.first - this.started;
    } else this.beyond += count;
    this.tokens += count;
  }

  get rate() {
    return this.beyond && this.last > this.first ? (this.beyond * 1000) / (this.last - this.first) : null;
  }

  live() {
    return this.rate ? `${this.rate.toFixed(this.rate < 10 ? 1 : 0)} tok/s` : duration(this.last - this.started);
  }

  end() {
    const { message } = this;
    if (this.tokens) Object.assign(message, { tokens: message.tokens ?? this.tokens, rate: this.rate });
    if (message.reasoning) message.thought_ms ??= this.last - (this.first ?? this.started);
  }
}

/** Enter what a chunk says into the message. */
function take(message, chunk, clock) {
  if (chunk.usage) message.tokens = chunk.usage.completion_tokens;
  const choice = chunk.choices[0];
  if (!choice) return;
  clock.tick(choice.token_ids?.length ?? 1);
  const { delta } = choice;
  message.reasoning += delta.reasoning ?? "";
  if (message.reasoning && (delta.content || delta.tool_calls)) message.thought_ms ??= clock.last - clock.first;
  message.content += delta.content ?? "";
  for (const piece of delta.tool_calls ?? []) {
    message.calls[piece.index] ??= { id: piece.id, name: piece.function.name, arguments: "" };
    message.calls[piece.index].arguments += piece.function.arguments ?? "";
  }
  if (choice.finish_reason) message.finish = choice.finish_reason;
  if (choice.flaws) message.flaws = choice.flaws;
}

function toApi(message) {
  if (message.role === "user") return [{ role: "user", content: message.content }];
  const complete = message.calls.length > 0 && message.calls.every((call) => call.result !== undefined);
  if (!message.content && !complete) return []; // nothing that the model could go on from
  const said = { role: "assistant", content: message.content || null };
  if (!complete) return [said];
  said.reasoning = message.reasoning || undefined;
  said.tool_calls = message.calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
  return [said, ...message.calls.map((call) => ({ role: "tool", tool_call_id: call.id, content: call.result }))];
}

/** The message box is as high as its text, up to a third of the window. */
function grow() {
  const box = $("prompt");
  box.style.height = "auto";
  box.style.height = `${Math.min(box.scrollHeight, window.innerHeight / 3)}px`;
}
