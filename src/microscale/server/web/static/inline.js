// Text within a block of Markdown, to elements and text nodes: emphasis, code, links, formulas and the few HTML tags that
// models write. All other markup stays text.

import { h } from "/web/dom.js";
import { formula } from "/web/math.js";

const DEPTH = 12; // links and raised text within each other; deeper ones stay text
const LOOKBACK = 16; // delimiters that a closing one looks back through
const MATH = [["\\(", "\\)", false], ["\\[", "\\]", true], ["$$", "$$", true]];
const BREAK = /<br ?\/?>/iy;
const AUTOLINK = /<((?:https?:\/\/|mailto:)[^\s<>]*)>/y;
const BARE = /https?:\/\/[^\s<>"'`]*[^\s<>"'`.,:;!?)\]}*_~]/y;
const TARGET = /\(\s*<?([^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)*)>?(?:\s+(?:"[^"]*"|'[^']*'))?\s*\)/y;

function link(address, children) {
  let url = null;
  try {
    url = new URL(address);
  } catch {
    // Not an address of its own: it is shown as text.
  }
  if (!url || !["http:", "https:", "mailto:"].includes(url.protocol)) return h("span", {}, children);
  return h("a", { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow" }, children);
}

/** For each `[` its `]`, found once. */
function brackets(text) {
  const matching = new Map();
  const open = [];
  for (let i = 0; i < text.length; i++) {
    if (text[i] === "\\") i++;
    else if (text[i] === "[") open.push(i);
    else if (text[i] === "]" && open.length) matching.set(open.pop(), i);
  }
  return matching;
}

/** What a run of `*`, `_` or `~` may do, by what is next to it. */
function flanks(text, start, end) {
  const before = text[start - 1] ?? " ";
  const after = text[end] ?? " ";
  const space = (c) => /\s/.test(c);
  const punctuation = (c) => /[\p{P}\p{S}]/u.test(c);
  const left = !space(after) && (!punctuation(after) || space(before) || punctuation(before));
  const right = !space(before) && (!punctuation(before) || space(after) || punctuation(after));
  if (text[start] !== "_") return { opens: left, closes: right };
  return { opens: left && (!right || punctuation(before)), closes: right && (!left || punctuation(after)) };
}

export function inline(text, depth = 0) {
  const out = []; // strings, nodes, and delimiters that may still become something
  const stack = [];
  const unclosed = new Set(); // closing marks that do not come any more
  const matching = brackets(text);
  let i = 0;
  let plain = "";
  const flush = () => {
    if (plain) out.push(plain);
    plain = "";
  };
  const put = (node, end) => {
    flush();
    out.push(node);
    i = end;
  };
  while (i < text.length) {
    const c = text[i];
    const math = (c === "\\" || c === "$") && MATH.find(([opening]) => text.startsWith(opening, i));
    if (math) {
      const [opening, mark, displayed] = math;
      const end = unclosed.has(mark) ? -1 : text.indexOf(mark, i + 2);
      if (end < 0) {
        unclosed.add(mark);
        plain += opening;
        i += 2;
      } else put(formula(text.slice(i + 2, end), text.slice(i, end + 2), displayed), end + 2);
    } else if (c === "\\" && /[!-/:-@[-`{-~]/.test(text[i + 1] ?? "")) {
      plain += text[i + 1];
      i += 2;
    } else if (c === "`") {
      const run = /`+/y;
      run.lastIndex = i;
      const marks = run.exec(text)[0];
      const end = unclosed.has(marks) ? -1 : closing(text, i + marks.length, marks.length);
      if (end < 0) {
        unclosed.add(marks);
        plain += marks;
        i += marks.length;
      } else {
        const inner = text.slice(i + marks.length, end).replaceAll("\n", " ");
        put(h("code", {}, inner.trim() ? inner.replace(/^ (.*) $/, "$1") : inner), end + marks.length);
      }
    } else if ((c === "[" || (c === "!" && text[i + 1] === "[")) && depth < DEPTH && linked(text, i, matching)) {
      const { label, target, end } = linked(text, i, matching);
      put(link(target, inline(label, depth + 1)), end);
    } else if (c === "<" && (AUTOLINK.lastIndex = i, AUTOLINK.test(text))) {
      put(link(text.slice(i + 1, AUTOLINK.lastIndex - 1), [text.slice(i + 1, AUTOLINK.lastIndex - 1)]), AUTOLINK.lastIndex);
    } else if (c === "<" && (BREAK.lastIndex = i, BREAK.test(text))) {
      put(h("br"), BREAK.lastIndex);
    } else if (c === "<" && depth < DEPTH && raised(text, i, unclosed)) {
      const { tag, end } = raised(text, i, unclosed);
      put(h(tag, {}, inline(text.slice(i + 5, end), depth + 1)), end + 6);
    } else if (c === "h" && !/\w/.test(text[i - 1] ?? "") && (BARE.lastIndex = i, BARE.test(text))) {
      put(link(text.slice(i, BARE.lastIndex), [text.slice(i, BARE.lastIndex)]), BARE.lastIndex);
    } else if (c === "*" || c === "_" || c === "~") {
      let end = i + 1;
      while (text[end] === c) end++;
      flush();
      delimit(out, stack, { mark: c, left: end - i, ...flanks(text, i, end) });
      i = end;
    } else if (c === "\n") {
      if (plain.endsWith("  ")) {
        plain = plain.trimEnd();
        put(h("br"), i + 1);
      } else plain += text[i++];
    } else plain += text[i++];
  }
  flush();
  return out.map((item) => (item.mark ? item.mark.repeat(item.left) : item));
}

function closing(text, from, length) {
  const run = /`+/g;
  run.lastIndex = from;
  for (let found = run.exec(text); found; found = run.exec(text)) if (found[0].length === length) return found.index;
  return -1;
}

/** `<sub>` or `<sup>`, where it ends. */
function raised(text, at, unclosed) {
  const tag = text.slice(at, at + 5);
  if (tag !== "<sub>" && tag !== "<sup>") return null;
  const mark = `</${tag.slice(1)}`;
  const end = unclosed.has(mark) ? -1 : text.indexOf(mark, at + 5);
  if (end < 0) unclosed.add(mark);
  return end < 0 ? null : { tag: tag.slice(1, 4), end };
}

function linked(text, at, matching) {
  const open = text[at] === "!" ? at + 1 : at;
  const close = matching.get(open);
  if (close === undefined || text[close + 1] !== "(") return null;
  TARGET.lastIndex = close + 1;
  const found = TARGET.exec(text);
  return found && { label: text.slice(open + 1, close), target: found[1], end: TARGET.lastIndex };
}

/** Close what this run closes, then leave what is left of it for a later one. */
function delimit(out, stack, run) {
  while (run.closes && run.left) {
    let at = stack.length - 1;
    const least = Math.max(0, stack.length - LOOKBACK);
    while (at >= least && !(stack[at].mark === run.mark && stack[at].left)) at--;
    if (at < least) break;
    const opener = stack[at];
    const size = Math.min(2, opener.left, run.left);
    if (run.mark === "~" && size < 2) break;
    stack.length = at + 1;
    const inner = out.splice(opener.at + 1).map((item) => (item.mark ? item.mark.repeat(item.left) : item));
    out.push(h(run.mark === "~" ? "del" : size === 2 ? "strong" : "em", {}, inner));
    opener.left -= size;
    run.left -= size;
    if (!opener.left) stack.pop();
  }
  if (!run.left) return;
  run.at = out.push(run) - 1; // stays true: only what stands after it is ever taken out
  if (run.opens) stack.push(run);
}
