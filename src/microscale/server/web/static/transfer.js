// Conversations to a JSON file and back.

import { h } from "/web/dom.js";
import { fromJson } from "/web/tree.js";

const FORMAT = "microscale-conversations";
const MOST_BYTES = 60_000_000;

/** Let the browser save conversations as a file. */
export function download(conversations, name) {
  const data = { format: FORMAT, version: 1, conversations: conversations.map((conversation) => conversation.toJson()) };
  const address = URL.createObjectURL(new Blob([JSON.stringify(data, null, 1)], { type: "application/json" }));
  h("a", { href: address, download: `${name}-${new Date().toISOString().slice(0, 10)}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

/** The conversations of a file. Throws a sentence if it is not an export of this page. */
export async function readExport(file) {
  if (file.size > MOST_BYTES) throw new Error(`It is larger than ${MOST_BYTES / 1e6} MB.`);
  let data;
  try {
    data = JSON.parse(await file.text());
  } catch {
    throw new Error("It is not JSON.");
  }
  if (data?.format !== FORMAT || data.version !== 1 || !Array.isArray(data.conversations)) throw new Error("It is not an export of this page.");
  return data.conversations.map(fromJson);
}
