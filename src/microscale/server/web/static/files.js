// Text files that go with a message: read with limits, shown as chips, and sent as fenced text before the message.

import { h, icon } from "/web/dom.js";

export const MOST_FILES = 10;
export const MOST_BYTES = 512 * 1024; // of all files of a message: about 130,000 tokens

export const fileSize = (text) => {
  const bytes = new TextEncoder().encode(text).length;
  return bytes < 1024 ? `${bytes} bytes` : `${Math.ceil(bytes / 1024).toLocaleString("en")} KB`;
};

/** Name and text of a file. Throws a sentence if it is not text. */
async function read(file) {
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    throw new Error(`${file.name} was not attached: it is not a text file.`);
  }
  if (text.includes("\0")) throw new Error(`${file.name} was not attached: it is not a text file.`);
  return { name: file.name.replace(/[\s`]+/g, " "), text: text.replaceAll("\r\n", "\n") };
}

/** The attached files and those that are added now, and a sentence for each file that cannot be added. */
export async function withFiles(attached, added) {
  const files = [...attached];
  const problems = [];
  let bytes = files.reduce((sum, { text }) => sum + new TextEncoder().encode(text).length, 0);
  for (const file of added) {
    if (files.length >= MOST_FILES) problems.push(`${file.name} was not attached: a message can have ${MOST_FILES} files.`);
    else if (bytes + file.size > MOST_BYTES) problems.push(`${file.name} was not attached: the files of a message can have ${MOST_BYTES / 1024} KB together.`);
    else {
      try {
        files.push(await read(file));
        bytes += file.size;
      } catch (error) {
        problems.push(error.message);
      }
    }
  }
  return { files, problems };
}

/** The message as the model reads it: each file in a fence that is longer than any fence in the file. */
export function withFences(content, files) {
  const fenced = files.map(({ name, text }) => {
    const longest = Math.max(2, ...Array.from(text.matchAll(/`+/g), ([run]) => run.length));
    const fence = "`".repeat(longest + 1);
    const language = /\.(\w{1,12})$/.exec(name)?.[1] ?? "";
    return `${name}:\n\n${fence}${language}\n${text.replace(/\n$/, "")}\n${fence}`;
  });
  return [...fenced, content].filter(Boolean).join("\n\n");
}

/** A file in the message box. */
export const chip = (file, onRemove) =>
  h("li", {}, icon("file"), h("span", { class: "name" }, file.name), h("small", {}, fileSize(file.text)),
    h("button", { type: "button", class: "ghost small", "aria-label": `Remove ${file.name}`, onclick: onRemove }, icon("close")));

/** A file of a message that was sent; it opens to show its text. */
export function sentFile(file) {
  const text = h("pre", { tabindex: 0 });
  const open = () => {
    if (!text.firstChild) text.append(file.text);
  };
  return h("details", { class: "sent-file", ontoggle: open },
    h("summary", {}, icon("file"), h("span", { class: "name" }, file.name), h("small", {}, fileSize(file.text))), text);
}
