// One answer: what its chunks say, when they came, and messages as the API takes them.

import { withFences } from "/web/files.js";

export const duration = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(ms < 10_000 ? 1 : 0)} s`);

/** When the tokens of an answer came. */
export class Clock {
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

/** Add what a chunk says to the message. */
export function take(message, chunk, clock) {
  if (chunk.usage) {
    message.tokens = chunk.usage.completion_tokens;
    message.prompt_tokens = chunk.usage.prompt_tokens;
  }
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

/** A message as the API takes it. */
export function toApi(message) {
  if (message.role === "user") return [{ role: "user", content: withFences(message.content, message.files ?? []) }];
  const complete = message.calls.length > 0 && message.calls.every((call) => call.result !== undefined);
  if (!message.content && !complete) return []; // nothing that the model could go on from
  const said = { role: "assistant", content: message.content || null };
  if (!complete) return [said];
  said.reasoning = message.reasoning || undefined;
  said.tool_calls = message.calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
  return [said, ...message.calls.map((call) => ({ role: "tool", tool_call_id: call.id, content: call.result }))];
}
