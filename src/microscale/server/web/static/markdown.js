// Markdown as the models write it, to elements. Text is always a text node; links lead to http, https or mailto; no image
// is loaded. Time grows with the length of the text, whatever the text is.

import { h } from "/web/dom.js";
import { codeBlock } from "/web/code.js";
import { inline } from "/web/inline.js";
import { formula } from "/web/math.js";

const DEPTH = 12; // quotes and lists within each other; deeper ones stay text

// ---- blocks ---------------------------------------------------------------------------------------------------------

// No pattern has two adjacent parts that match the same characters: that would be time by the square of a line.
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?=\s|$)/;
const RULE = /^ {0,3}(?:(?:\*\s*){3,}|(?:-\s*){3,}|(?:_\s*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?:( +)(.*)|)$/;
const TASK = /^\[([ xX])\] +(?=\S)/;
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

/** A displayed formula. One that is not closed yet, while the answer is still coming, is shown as it was written. */
function math(lines, at) {
  const opening = MATH.exec(lines[at]);
  if (!opening) return null;
  const closing = opening[1] === "$$" ? "$$" : "\\]";
  const from = opening[0].length;
  let last = at;
  let close = lines[at].indexOf(closing, from);
  while (close < 0 && last + 1 < lines.length && !blank(lines[last + 1])) close = lines[++last].indexOf(closing);
  if (close < 0) return { end: last + 1, draw: () => h("pre", { class: "math" }, lines.slice(at, last + 1).join("\n").trim()) };
  const shown = [...lines.slice(at, last), lines[last].slice(0, close + 2)].join("\n").trim();
  const after = lines[last].slice(close + 2).trim();
  const draw = () => formula(shown.slice(2, -2), shown, true);
  return { end: last + 1, draw: after ? () => h("div", {}, draw(), h("p", {}, inline(after))) : draw };
}

function heading(lines, at) {
  const found = HEADING.exec(lines[at]);
  if (!found) return null;
  let text = lines[at].slice(found[0].length).trim();
  let end = text.length;
  while (end && text[end - 1] === "#") end--;
  // Closing marks are separated from the text, or are all there is.
  if (!end || /\s/.test(text[end - 1])) text = text.slice(0, end).trimEnd();
  // The page has its own h1, and answers come below it.
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
  const item = (body) => {
    const task = ordered ? null : TASK.exec(body[0]);
    if (!task) return h("li", {}, tight(draw(body, depth + 1), loose));
    const done = task[1] !== " ";
    const box = h("input", { type: "checkbox", disabled: true, checked: done, "aria-label": done ? "Done" : "To do" });
    const rest = tight(draw([body[0].slice(task[0].length), ...body.slice(1)], depth + 1), loose);
    return h("li", { class: "task" }, box, rest);
  };
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
