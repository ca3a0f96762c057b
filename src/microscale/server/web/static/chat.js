// The open conversation: what is shown of it, and the one answer that may be in progress.

import { Clock, take, toApi } from "/web/answer.js";
import { chat } from "/web/api.js";
import { Composer } from "/web/composer.js";
import { $, announce, icon } from "/web/dom.js";
import { showIdeas } from "/web/ideas.js";
import { fields, offerTools, systemPrompt } from "/web/settings.js";
import { Conversation } from "/web/tree.js";
import { Follower, ModelTurn, UserTurn } from "/web/turn.js";

const SPOKEN = 600; // characters of an answer that are read out when it is complete
const SAVE_EVERY_MS = 2000; // while an answer comes, so that little is lost when the page is closed
const FULL = 0.9; // of the context; from here on the page warns
const number = new Intl.NumberFormat("en");

const isEmpty = (message) => !message.content && !message.reasoning && !message.calls.length;
const isPending = (message) => !message.stopped && !message.error && message.calls.some((call) => call.result === undefined);

export class Chat {
  /** `onChange` gets the conversation whenever its messages change. */
  constructor({ onError, onBusy, onChange }) {
    this.conversation = new Conversation();
    this.turns = [];
    this.stopper = null; // of the answer that is in progress
    this.maximum = null; // tokens of a context
    Object.assign(this, { onError, onBusy, onChange });
    this.follower = new Follower();
    this.composer = new Composer({
      onSend: () => this.send(), onStop: () => this.stop(), onProblem: onError, onEditing: (message) => this.showEditing(message),
    });
    this.showState();
  }

  get busy() {
    return this.stopper !== null;
  }

  showModel(name, maximum) {
    this.maximum = maximum;
    this.showContext();
    showIdeas(name, (text, tools) => {
      offerTools(tools);
      this.composer.put({ text });
      this.send();
    });
  }

  // ---- what the user does ---------------------------------------------------------------------------------------------

  send() {
    if (this.composer.empty || this.busy) return;
    let body;
    try {
      body = fields();
    } catch (error) {
      this.onError(error);
      return;
    }
    const { text, files, editing } = this.composer.content;
    if (editing) this.conversation.leaf = editing.parent;
    this.skipCalls();
    this.conversation.add({ role: "user", content: text, files });
    this.composer.clear();
    this.follower.toEnd();
    this.answer(body);
  }

  stop() {
    this.stopper?.abort();
  }

  /** Another answer to the same question. The old one stays, unless it is only an error. */
  retry() {
    const last = this.conversation.path.at(-1);
    if (this.busy || last?.role !== "model") return;
    if (last.error && isEmpty(last)) this.conversation.drop(last);
    this.conversation.leaf = last.parent;
    this.answer();
  }

  edit(message) {
    if (!this.busy) this.composer.edit(message);
  }

  showVersion(message, focus) {
    if (this.busy) return;
    this.composer.cancelEdit();
    this.conversation.show(message);
    this.showPath();
    this.onChange(this.conversation);
    const turn = this.turns.find((other) => other.message === message);
    turn.element.querySelector(`.versions [aria-label="${focus}"]`).focus();
  }

  /** The result of a call, entered by the user; the model goes on when it has all of them. */
  giveResult(call, result) {
    if (this.busy) return;
    call.result = result;
    const last = this.conversation.path.at(-1);
    if (isPending(last)) this.turns.at(-1).finish({ last: true, canAnswer: true });
    else this.answer();
  }

  /** Show a conversation, or a new one. An answer in progress is stopped and kept. */
  open(conversation = new Conversation()) {
    this.stop();
    this.stopper = null;
    if (this.composer.editing) this.composer.cancelEdit();
    this.conversation = conversation;
    this.onError(null);
    this.showPath();
    this.follower.toEnd();
  }

  // ---- an answer ------------------------------------------------------------------------------------------------------

  /** Ask for an answer to what is shown. */
  async answer(body = null) {
    const { conversation } = this;
    const history = this.history();
    const message = { role: "model", content: "", reasoning: "", calls: [], ended: false };
    conversation.add(message);
    const stopper = new AbortController();
    this.stopper = stopper;
    this.composer.cancelEdit();
    this.showPath();
    this.onChange(conversation);
    const turn = this.turns.at(-1);
    this.onError(null);
    announce("The model is thinking.");
    const clock = new Clock(message);
    let failure = null;
    let drawing = 0;
    let saved = performance.now();
    const draw = () => {
      drawing = 0;
      turn.update();
      $("speed").textContent = clock.live();
      this.follower.moved();
      if (performance.now() - saved < SAVE_EVERY_MS) return;
      saved = performance.now();
      this.onChange(conversation);
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
    if (this.stopper === stopper) this.stopper = null;
    // Another conversation may be open by now.
    if (this.conversation === conversation) this.showEnd(turn, message, failure);
    this.onChange(conversation);
  }

  showEnd(turn, message, failure) {
    const asked = this.conversation.messages.get(message.parent);
    if (failure && isEmpty(message) && asked.role === "user" && this.composer.empty) {
      this.takeBack(message, asked, failure);
      return;
    }
    if (failure?.status === 401) this.onError(failure);
    this.showState();
    const pending = isPending(message);
    turn.finish({ last: true, canAnswer: pending });
    this.follower.moved();
    const calls = message.calls.map((call) => call.name).join(", ");
    const spoken = turn.content.textContent.slice(0, SPOKEN);
    announce(message.error ?? (message.stopped ? "Stopped." : calls ? `The model calls ${calls}.` : `Answer: ${spoken}`));
    if (pending) turn.calls.querySelector("textarea")?.focus();
  }

  /** A failed request leaves no trace: an older answer is shown again, or else the question goes back into the box. */
  takeBack(message, asked, failure) {
    const { conversation, composer } = this;
    conversation.drop(message);
    const repeated = conversation.path.at(-1) !== asked;
    if (!repeated) conversation.drop(asked);
    this.showPath();
    if (!repeated) composer.put({ text: asked.content, files: asked.files, editing: conversation.versions(asked).at(-1) ?? null });
    $("prompt").focus();
    this.onError(failure, () => (repeated ? this.retry() : this.send()));
  }

  /** Calls that the user answers with a message instead of a result. */
  skipCalls() {
    for (const call of this.conversation.path.at(-1)?.calls ?? []) call.result ??= "(no result)";
  }

  /** The conversation as the API takes it. */
  history() {
    const system = systemPrompt() ? [{ role: "system", content: systemPrompt() }] : [];
    return [...system, ...this.conversation.path.flatMap(toApi)];
  }

  // ---- what is shown --------------------------------------------------------------------------------------------------

  /** Show the path of the conversation. Turns that are already there keep their elements. */
  showPath() {
    const { path } = this.conversation;
    let same = 0;
    while (same < path.length && this.turns[same]?.message === path[same]) same++;
    for (const turn of this.turns.splice(same)) turn.element.remove();
    const actions = {
      edit: (message) => this.edit(message),
      retry: () => this.retry(),
      answer: (call, result) => this.giveResult(call, result),
      versions: (message) => this.conversation.versions(message),
      show: (message, focus) => this.showVersion(message, focus),
    };
    for (const message of path.slice(same)) {
      const turn = message.role === "user" ? new UserTurn(message, actions) : new ModelTurn(message, actions);
      this.turns.push(turn);
      $("log").append(turn.element);
    }
    for (const turn of this.turns.slice(Math.max(same - 1, 0))) {
      const last = turn === this.turns.at(-1);
      turn.finish({ last, canAnswer: last && turn.message.role === "model" && isPending(turn.message) });
    }
    this.showState();
    this.follower.moved();
  }

  showState() {
    const begun = this.turns.length > 0;
    $("empty").hidden = begun;
    $("new").hidden = !begun;
    $("conversation").hidden = !begun;
    $("conversation").textContent = this.conversation.name;
    $("log").classList.toggle("busy", this.busy);
    const send = $("send");
    send.classList.toggle("stop", this.busy);
    send.setAttribute("aria-label", this.busy ? "Stop" : "Send");
    send.title = this.busy ? "Stop (Esc)" : "Send (Enter)";
    send.replaceChildren(icon(this.busy ? "stop" : "send"));
    if (!this.busy) $("speed").textContent = "";
    this.composer.busy = this.busy;
    this.showContext();
    this.onBusy(this.busy);
  }

  /** How much of the model's context the conversation used at its last answer. */
  showContext() {
    const last = this.conversation.path.findLast((message) => message.prompt_tokens);
    $("context").hidden = !last || !this.maximum;
    if ($("context").hidden) return;
    const used = last.prompt_tokens + (last.tokens ?? 0);
    const full = used >= FULL * this.maximum;
    $("context").classList.toggle("full", full);
    $("context").textContent = `Context: ${number.format(used)} of ${number.format(this.maximum)} tokens${full ? ", nearly full" : ""}`;
  }

  /** What follows an edited message is dimmed: it will not be part of the new version. */
  showEditing(message) {
    const at = this.turns.findIndex((turn) => turn.message === message);
    this.turns.forEach((turn, i) => {
      turn.element.classList.toggle("edited", i === at);
      turn.element.classList.toggle("left-out", at >= 0 && i > at);
    });
  }
}
