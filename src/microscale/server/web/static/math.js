// Formulas. KaTeX is loaded when the first one is drawn; until then, and where it fails, the source is shown. KaTeX builds
// elements and sets styles by script, which the page's policy permits.

import { h } from "/web/dom.js";

const LONGEST = 4000; // characters of a formula; a longer one stays source
const KEPT = 300; // typeset formulas: a paragraph that grows draws its formulas again with every token
const RETRY_MS = 10_000; // after KaTeX could not be loaded
const OPTIONS = { throwOnError: true, trust: false, strict: "ignore", maxExpand: 500, maxSize: 20, output: "htmlAndMathml", errorColor: "inherit" };

let katex = null;
let loading = null;
let waiting = []; // formulas that were drawn before KaTeX was there
const typeset = new Map();

function load() {
  const style = h("link", { rel: "stylesheet", href: "/web/katex/katex.min.css" });
  const styled = new Promise((resolve, reject) => {
    style.onload = resolve;
    style.onerror = reject;
  });
  document.head.append(style);
  // Its file is a script that sets a global, not a module.
  return Promise.all([import("/web/katex/katex.min.js"), styled]).then(
    () => {
      katex = globalThis.katex;
      for (const draw of waiting.splice(0)) draw();
    },
    () => {
      style.remove();
      setTimeout(() => (loading = null), RETRY_MS);
      waiting = [];
    },
  );
}

/** Styles that KaTeX would set as attributes, which the policy forbids: only decorations of the MathML are lost. */
function withoutStyleAttributes(node) {
  if (node.attributes) delete node.attributes.style;
  for (const child of node.children ?? []) withoutStyleAttributes(child);
  return node;
}

function render(source, displayMode) {
  const key = `${displayMode} ${source}`;
  let done = typeset.get(key);
  if (!done) {
    try {
      done = withoutStyleAttributes(katex.__renderToDomTree(source, { ...OPTIONS, displayMode })).toNode();
    } catch {
      return null; // not what KaTeX understands
    }
    if (typeset.size >= KEPT) typeset.delete(typeset.keys().next().value);
    typeset.set(key, done);
  }
  return done.cloneNode(true);
}

/** A formula in an element that stays. `shown` is how it was written, with its marks. */
export function formula(source, shown, displayed) {
  const holder = h(displayed ? "div" : "span", { class: "math" }, h(displayed ? "pre" : "code", {}, shown));
  if (source.length > LONGEST || !source.trim()) return holder;
  const draw = () => {
    const node = render(source, displayed);
    if (!node) return;
    holder.replaceChildren(node);
    holder.classList.add("typeset");
    // What is wider than the window scrolls, by keyboard too.
    if (displayed) requestAnimationFrame(() => holder.scrollWidth > holder.clientWidth && holder.setAttribute("tabindex", 0));
  };
  if (katex) draw();
  else {
    waiting.push(draw);
    loading ??= load();
  }
  return holder;
}
