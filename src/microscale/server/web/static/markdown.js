// Markdown as the models write it, to elements. Text is only ever a text node; links lead to http, https or mailto; no
// image is loaded. Time grows with the length of the text, whatever the text is.

import { h } from "/web/dom.js";
import { codeBlock } from "/web/code.js";

const DEPTH = 12; // of quotes and lists within each other; deeper ones stay text
const LOOKBACK = 16; // delimiters that a closing one looks back through

// ---- blocks ---------------------------------------------------------------------------------------------------------

// No pattern has two parts side by side that take the same characters: that would be time by the square of a line.
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?=\s|$)/;
const RULE = /^ {0,3}(?:(?:\*\s*){3,}|(?:-\s*){3,}|(?:_\s*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?:( +)(.*)|)$/;
const DIVIDER = /^ {0,3}[|:-][\s|:-]*$/;
const MATH = /^\s*(\\\[|\$\$)/;

const blank = (line) => line.trim() === "";
const indentOf = (line) => line.length - line.trimStart().length;

/** Blocks of some lines, each with where it starts and ends and how it is drawn. */
function* blocks(lines, depth) {
  let at = 0;
  while (at < lines.length) {
    if (blank(lines[at])) {
      at++;
      continue;
    }
    const start = at;
    const found = fence(lines, at) ?? math(lines, at) ?? heading(lines, at) ?? rule(lines, at) ?? quote(lines, at, depth)
      ?? list(lines, at, depth) ?? table(lines, at) ?? paragraph(lines, at, depth);
    at = found.end;
    yield { start, end: at, draw: found.draw };
  }
}

function fence(lines, at) {
  const opening = FENCE.exec(lines[at]);
  if (!opening) return null;
  const [, marks, info] = opening;
  let end = at + 1;
  const closes = (line) => {
    const trimmed = line.trim();
    return trimmed.length >= marks.length && trimmed.startsWith(marks) && trimmed.replaceAll(marks[0], "") === "";
  };
  while (end < lines.length && !closes(lines[end])) end++;
  const indent = indentOf(lines[at]);
  const body = lines.slice(at + 1, end).map((line) => line.slice(Math.min(indent, indentOf(line))));
  return { end: Math.min(end + 1, lines.length), draw: () => codeBlock(body.join("\n"), info.trim().split(/\s/)[0]) };
}

/** Displayed mathematics, as it was written: there is no typesetting here. */
function math(lines, at) {
  const opening = MATH.exec(lines[at]);
  if (!opening) return null;
  const closing = opening[1] === "$$" ? "$$" : "\\]";
  let end = at;
  const after = lines[at].indexOf(opening[1]) + 2;
  if (!lines[at].includes(closing, after)) {
    do end++; while (end < lines.length && !lines[end].includes(closing) && !blank(lines[end]));
    if (end < lines.length && blank(lines[end])) end--;
  }
  const body = lines.slice(at, end + 1).join("\n").trim();
  return { end: Math.min(end + 1, lines.length), draw: () => h("pre", { class: "math" }, body) };
}

function heading(lines, at) {
  const found = HEADING.exec(lines[at]);
  if (!found) return null;
  let text = lines[at].slice(found[0].length).trim();
  let end = text.length;
  while (end && text[end - 1] === "#") end--;
  // Closing marks stand apart from the text, or are all there is.
  if (!end || /\s/.test(text[end - 1])) text = text.slice(0, end).trimEnd();
  // The page has an h1 of its own, and answers stand below it.
  return { end: at + 1, draw: () => h(`h${Math.min(found[1].length + 2, 6)}`, {}, inline(text)) };
}

function rule(lines, at) {
  return RULE.test(lines[at]) ? { end: at + 1, draw: () => h("hr") } : null;
}

function quote(lines, at, depth) {
  if (depth >= DEPTH || !QUOTE.test(lines[at])) return null;
  let end = at + 1;
  while (end < lines.length && !blank(lines[end]) && (QUOTE.test(lines[end]) || !interrupts(lines[end]))) end++;
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return { end, draw: () => h("blockquote", {}, draw(inner, depth + 1)) };
}

function list(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  if (depth >= DEPTH || !first) return null;
  const ordered = /\d/.test(first[2]);
  const kind = first[2].at(-1);
  const items = [];
  let loose = false;
  let end = at;
  while (end < lines.length) {
    const found = ITEM.exec(lines[end]);
    if (!found || found[2].at(-1) !== kind || (RULE.test(lines[end]) && !ordered)) break;
    const spaces = (found[3] ?? " ").length;
    const width = found[1].length + found[2].length + (spaces > 4 ? 1 : spaces);
    const body = [found[4] ?? ""];
    end++;
    while (end < lines.length) {
      const line = lines[end];
      if (blank(line)) {
        let next = end + 1;
        while (next < lines.length && blank(lines[next])) next++;
        if (next >= lines.length || (indentOf(lines[next]) < width && !ITEM.test(lines[next]))) break;
        loose ||= indentOf(lines[next]) < width;
        if (indentOf(lines[next]) < width) {
          end = next;
          break;
        }
        for (; end < next; end++) body.push("");
        continue;
      } else if (indentOf(line) >= width) body.push(line.slice(width));
      // Models indent by two where three are due.
      else if (indentOf(line) >= 2 && ITEM.test(line.trimStart())) body.push(line.trimStart());
      else if (ITEM.test(line) || interrupts(line)) break;
      else body.push(line.trimStart());
      end++;
    }
    items.push(body);
  }
  const start = ordered ? Number.parseInt(first[2], 10) : null;
  const item = (body) => h("li", {}, tight(draw(body, depth + 1), loose));
  return { end, draw: () => h(ordered ? "ol" : "ul", ordered && start !== 1 ? { start } : {}, items.map(item)) };
}

/** Items without lines between them hold text, not paragraphs. */
function tight(nodes, loose) {
  return loose ? nodes : nodes.flatMap((node) => (node.tagName === "P" ? [...node.childNodes] : [node]));
}

const cells = (line) =>
  line.trim().replace(/^\|/, "").replace(/(^|[^\\])\|$/, "$1").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));

function table(lines, at) {
  if (at + 1 >= lines.length || !lines[at].includes("|") || !DIVIDER.test(lines[at + 1])) return null;
  if (!cells(lines[at + 1]).every((cell) => /^:?-+:?$/.test(cell))) return null;
  const head = cells(lines[at]);
  const aligned = cells(lines[at + 1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "end") : null));
  if (head.length !== aligned.length) return null;
  let end = at + 2;
  while (end < lines.length && !blank(lines[end]) && lines[end].includes("|")) end++;
  const rows = lines.slice(at + 2, end).map(cells);
  const row = (tag, values) => h("tr", {}, head.map((_, i) => h(tag, { class: aligned[i] }, inline(values[i] ?? ""))));
  // Scrolls by keyboard too.
  return { end, draw: () => h("div", { class: "table", tabindex: 0, role: "region", "aria-label": "Table" },
    h("table", {}, h("thead", {}, row("th", head)), h("tbody", {}, rows.map((values) => row("td", values))))) };
}

const interrupts = (line) => FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || MATH.test(line);

function paragraph(lines, at, depth) {
  let end = at + 1;
  const begins = (line) => interrupts(line) || (depth < DEPTH && /^ {0,3}(?:[-*+]|1[.)]) +\S/.test(line));
  while (end < lines.length && !blank(lines[end]) && !begins(lines[end]) && !table(lines, end)) end++;
  const text = lines.slice(at, end).map((line) => line.trimStart()).join("\n");
  return { end, draw: () => h("p", {}, inline(text)) };
}

const draw = (lines, depth) => Array.from(blocks(lines, depth), (block) => block.draw());

// ---- text within a block --------------------------------------------------------------------------------------------

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

/** What a run of `*`, `_` or `~` may do, by what stands beside it. */
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

function inline(text, depth = 0) {
  const out = []; // strings, nodes, and delimiters that may still become something
  const stack = [];
  const unclosed = new Set(); // marks of code and mathematics that nothing closes any more
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
    if (c === "\\" && (text[i + 1] === "(" || text[i + 1] === "[")) {
      const mark = text[i + 1] === "(" ? "\\)" : "\\]";
      const end = unclosed.has(mark) ? -1 : text.indexOf(mark, i + 2);
      if (end < 0) unclosed.add(mark);
      if (end > 0) put(h("code", { class: "math" }, text.slice(i, end + 2)), end + 2);
      else plain += text[i++];
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

// ---- a text that grows ----------------------------------------------------------------------------------------------

/** Draws a text into an element, again and again as it grows: blocks that have not changed keep their elements. */
export class Markdown {
  constructor(element) {
    this.element = element;
    this.drawn = []; // source and element of each block
  }

  update(text) {
    const lines = text.replaceAll("\r\n", "\n").replaceAll("\t", "    ").split("\n");
    let count = 0;
    for (const block of blocks(lines, 0)) {
      const source = lines.slice(block.start, block.end).join("\n");
      const before = this.drawn[count];
      if (before?.source !== source) {
        const node = block.draw();
        if (before) before.node.replaceWith(node);
        else this.element.append(node);
        this.drawn[count] = { source, node };
      }
      count++;
    }
    for (const { node } of this.drawn.splice(count)) node.remove();
  }
}
