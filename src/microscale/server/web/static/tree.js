// A conversation as a tree: an edited question and a repeated answer are new versions next to the old ones, and nothing is
// overwritten. What is shown is the path from the first message to `leaf`.

const NAME_LENGTH = 80;
const OPTIONAL = {
  thought_ms: "number", first_ms: "number", tokens: "number", prompt_tokens: "number", rate: "number",
  finish: "string", error: "string", stopped: "boolean",
};

// crypto.randomUUID needs HTTPS; many servers of this page do not have it.
export const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");

export class Conversation {
  constructor({ id = newId(), title = "", created = Date.now(), changed = created, leaf = null, messages = [] } = {}) {
    Object.assign(this, { id, title, created, changed, leaf });
    this.messages = new Map(messages.map((message) => [message.id, message]));
    this.removed = false;
  }

  /** The title that the user gave, or the beginning of the first question. */
  get name() {
    const [first] = this.path;
    const text = this.title || (first?.content || first?.files?.[0]?.name || "").trim().split("\n")[0];
    return text.length > NAME_LENGTH ? `${text.slice(0, NAME_LENGTH)}…` : text || "New conversation";
  }

  get path() {
    const path = [];
    for (let at = this.leaf; at !== null; at = this.messages.get(at).parent) path.push(this.messages.get(at));
    return path.reverse();
  }

  /** Add a message after `parent` and show it. */
  add(message, parent = this.leaf) {
    message.id = Math.max(-1, ...this.messages.keys()) + 1;
    message.parent = parent;
    this.messages.set(message.id, message);
    this.leaf = message.id;
    this.changed = Date.now();
  }

  /** All versions of a message, this one included, oldest first. */
  versions(message) {
    return [...this.messages.values()].filter((other) => other.parent === message.parent);
  }

  /** Show the newest path through this message. */
  show(message) {
    for (let next = message; next; next = [...this.messages.values()].findLast((other) => other.parent === this.leaf)) this.leaf = next.id;
  }

  /** Remove the last message of the path; an older version of it is shown then, if there is one. */
  drop(message) {
    this.messages.delete(message.id);
    const other = this.versions(message).at(-1);
    if (other) this.show(other);
    else this.leaf = message.parent;
  }

  toJson() {
    const { id, title, created, changed, leaf } = this;
    return { id, title, created, changed, leaf, messages: [...this.messages.values()] };
  }
}

/** A conversation from a file or from storage. Throws a sentence if it is not one. */
export function fromJson(value) {
  const wrong = (what) => new Error(`This is not a conversation: ${what}.`);
  if (typeof value !== "object" || value === null || !Array.isArray(value.messages)) throw wrong("it has no list of messages");
  const time = (given) => (Number.isFinite(given) ? given : Date.now());
  const seen = new Set();
  const messages = value.messages.map((given) => {
    const message = checked(given);
    if (!message) throw wrong("a message is incomplete");
    if (seen.has(message.id) || !(message.parent === null || seen.has(message.parent))) throw wrong("its messages are out of order");
    seen.add(message.id);
    return message;
  });
  if (!messages.length) throw wrong("it is empty");
  if (!seen.has(value.leaf)) throw wrong("its last message is missing");
  return new Conversation({
    id: /^[0-9a-f]{24}$/.test(value.id) ? value.id : newId(),
    title: typeof value.title === "string" ? value.title.slice(0, NAME_LENGTH) : "",
    created: time(value.created), changed: time(value.changed), leaf: value.leaf, messages,
  });
}

const texts = (value, ...names) => typeof value === "object" && value !== null && names.every((name) => typeof value[name] === "string");

/** A copy with the fields that a message has, or null. */
function checked(given) {
  if (!texts(given, "content") || !Number.isSafeInteger(given.id)) return null;
  const { id, parent, content } = given;
  if (given.role === "user") {
    const files = given.files ?? [];
    if (!Array.isArray(files) || !files.every((file) => texts(file, "name", "text"))) return null;
    return { id, parent, role: "user", content, files: files.map(({ name, text }) => ({ name, text })) };
  }
  const calls = given.calls ?? [];
  if (given.role !== "model" || !texts(given, "reasoning") || !Array.isArray(calls) || !calls.every((call) => texts(call, "id", "name", "arguments"))) return null;
  const message = { id, parent, role: "model", content, reasoning: given.reasoning, ended: true };
  message.calls = calls.map((call) => ({ id: call.id, name: call.name, arguments: call.arguments, ...(typeof call.result === "string" ? { result: call.result } : {}) }));
  for (const [name, type] of Object.entries(OPTIONAL)) if (typeof given[name] === type) message[name] = given[name];
  if (Array.isArray(given.flaws)) message.flaws = given.flaws.filter((flaw) => typeof flaw === "string");
  // The page was left before the answer was complete.
  if (given.ended === false) message.stopped = true;
  return message;
}
