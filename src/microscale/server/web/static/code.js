// A block of code with its language, a copy button, and colours for what most languages share.

import { copy, h, icon } from "/web/dom.js";

const WORDS = new Set(
  ("abstract and as assert async await bool break case catch char class const constexpr continue def default del delete do " +
    "double elif else end enum except export extends extern false False final finally float fn for from func function global " +
    "if impl import in include inline instanceof int interface is lambda let long loop match mod module move mut namespace new " +
    "nil None nonlocal not null nullptr of or package pass private protected pub public raise ref return self Self short signed " +
    "sizeof static string struct super switch template then this throw trait true True try type typedef typename typeof undefined union unsafe " +
    "unsigned use using var virtual void volatile where while with yield select SELECT FROM WHERE JOIN ON GROUP BY ORDER LIMIT " +
    "INSERT INTO UPDATE SET DELETE CREATE TABLE AND OR NOT NULL AS").split(" "),
);
const HASH = new Set(["py", "python", "sh", "bash", "shell", "zsh", "console", "rb", "ruby", "yaml", "yml", "toml", "r", "perl", "make", "makefile", "dockerfile", ""]);
const PLAIN = new Set(["text", "txt", "plaintext", "markdown", "md"]);
const DASH = new Set(["sql", "lua", "haskell", "hs"]);
const MOST = 50_000; // characters that are coloured; more would take its time at every token

const STRING = String.raw`("""[\s\S]*?(?:"""|$)|'''[\s\S]*?(?:'''|$)|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?)`;
const REST = String.raw`(\b\d[\w.]*)|([A-Za-z_]\w*)(?=(\s*\()?)`;
const COMMENT = { hash: "(#[^\\n]*)", dash: "(--[^\\n]*)", slash: String.raw`(\/\*[\s\S]*?(?:\*\/|$)|\/\/[^\n]*)` };
const TOKEN = Object.fromEntries(
  Object.entries(COMMENT).map(([style, comment]) => [style, new RegExp([STRING, comment, REST].join("|"), "g")]),
);

function coloured(text, language) {
  if (text.length > MOST || PLAIN.has(language)) return [text];
  const out = [];
  let last = 0;
  const mark = (kind, found) => {
    out.push(text.slice(last, found.index), h("span", { class: kind }, found[0]));
    last = found.index + found[0].length;
  };
  const style = HASH.has(language) ? "hash" : DASH.has(language) ? "dash" : "slash";
  for (const found of text.matchAll(TOKEN[style])) {
    const [, string, comment, number, word, call] = found;
    if (string) mark("str", found);
    else if (comment) mark("com", found);
    else if (number) mark("num", found);
    else if (word && WORDS.has(word)) mark("kw", found);
    else if (word && call) mark("fn", found);
  }
  out.push(text.slice(last));
  return out;
}

export function codeBlock(text, language = "") {
  const button = h("button", { type: "button", class: "ghost small", "aria-label": "Copy the code", onclick: () => copy(text, button) }, icon("copy"));
  return h("figure", { class: "code" },
    h("figcaption", {}, h("span", {}, language || "code"), button),
    h("pre", { tabindex: 0 }, h("code", {}, coloured(text, language.toLowerCase()))));
}
