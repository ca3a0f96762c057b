// Where conversations are kept: in IndexedDB, or, where the browser forbids it (private windows), in the tab's session
// storage. Both hold a limited number of conversations; the oldest ones are removed.

import { keep, recall } from "/web/dom.js";

export const MOST = 200; // conversations
const MOST_CHARACTERS = 50_000_000; // of all conversations together
const PATIENCE_MS = 3000; // some browsers never answer in private windows

const newestFirst = (list) => list.sort((a, b) => b.changed - a.changed);
const summary = (json, name) => ({ id: json.id, name, changed: json.changed, size: JSON.stringify(json).length });

/** The ids that must go, so that the others are within the limits. `kept` stays in any case. */
export function surplus(list, kept, most = MOST, characters = MOST_CHARACTERS) {
  let count = 0;
  let total = 0;
  const first = list.filter((entry) => entry.id === kept);
  const others = newestFirst(list.filter((entry) => entry.id !== kept));
  return [...first, ...others].filter(({ id, size }) => {
    count += 1;
    total += size;
    return id !== kept && (count > most || total > characters);
  }).map(({ id }) => id);
}

const settled = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

class Database {
  constructor(database) {
    this.database = database;
    this.lasts = true;
  }

  static open() {
    const request = indexedDB.open("microscale", 1);
    request.onupgradeneeded = () => {
      // Summaries apart from the messages, so that the list is read without them.
      request.result.createObjectStore("summaries", { keyPath: "id" });
      request.result.createObjectStore("conversations", { keyPath: "id" });
    };
    return settled(request).then((database) => {
      database.onversionchange = () => database.close();
      return new Database(database);
    });
  }

  transaction(mode) {
    const transaction = this.database.transaction(["summaries", "conversations"], mode);
    const done = new Promise((resolve, reject) => {
      transaction.oncomplete = resolve;
      transaction.onabort = transaction.onerror = () => reject(transaction.error);
    });
    return { summaries: transaction.objectStore("summaries"), conversations: transaction.objectStore("conversations"), done };
  }

  async list() {
    return newestFirst(await settled(this.transaction("readonly").summaries.getAll()));
  }

  load(id) {
    return settled(this.transaction("readonly").conversations.get(id));
  }

  async save(json, name) {
    const { summaries, conversations, done } = this.transaction("readwrite");
    summaries.put(summary(json, name));
    conversations.put(json);
    summaries.getAll().onsuccess = (event) => {
      for (const id of surplus(event.target.result, json.id)) {
        summaries.delete(id);
        conversations.delete(id);
      }
    };
    await done;
  }

  async remove(id) {
    const { summaries, conversations, done } = this.transaction("readwrite");
    summaries.delete(id);
    conversations.delete(id);
    await done;
  }
}

class Tab {
  constructor() {
    this.lasts = false;
    let kept = [];
    try {
      kept = JSON.parse(recall("sessionStorage", "conversations") ?? "[]");
    } catch {
      // It begins empty.
    }
    this.entries = new Map(kept.map((entry) => [entry.json.id, entry]));
  }

  write() {
    keep("sessionStorage", "conversations", JSON.stringify([...this.entries.values()]));
  }

  async list() {
    return newestFirst([...this.entries.values()].map(({ json, name }) => summary(json, name)));
  }

  async load(id) {
    return this.entries.get(id)?.json;
  }

  async save(json, name) {
    this.entries.set(json.id, { json: structuredClone(json), name });
    for (const id of surplus(await this.list(), json.id)) this.entries.delete(id);
    this.write();
  }

  async remove(id) {
    this.entries.delete(id);
    this.write();
  }
}

export async function openStore() {
  try {
    const late = new Promise((_, reject) => setTimeout(() => reject(new Error("no answer")), PATIENCE_MS));
    const database = await Promise.race([Database.open(), late]);
    await database.list();
    return database;
  } catch {
    return new Tab();
  }
}
