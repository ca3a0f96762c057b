// Elements without markup: every text is a text node, so no text can become an element.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  // One by one: a long answer has more pieces than a call may have arguments.
  for (const child of children.flat()) if (child !== null && child !== undefined && child !== false) element.append(child);
  return element;
}

/** An HTML element: `h("button", {type: "button", onclick: go}, "Go")`. */
export const h = (tag, props = {}, ...children) => fill(document.createElement(tag), props, children);

/** An SVG element. */
export const s = (tag, props = {}, ...children) => fill(document.createElementNS(SVG, tag), props, children);

export const icon = (name) => s("svg", { class: "icon", "aria-hidden": "true" }, s("use", { href: `#i-${name}` }));

export const $ = (id) => document.getElementById(id);

/** Storage that may be forbidden, or full. */
export function recall(storage, key) {
  try {
    return window[storage].getItem(`microscale.${key}`);
  } catch {
    return null;
  }
}

export function keep(storage, key, value) {
  try {
    if (value === null || value === "") window[storage].removeItem(`microscale.${key}`);
    else window[storage].setItem(`microscale.${key}`, value);
  } catch {
    // The page works without it until it is loaded again.
  }
}

/** Tell a screen reader what changed. */
export function announce(text) {
  const status = $("status");
  // The same text is read again only if it was removed in between.
  status.textContent = "";
  setTimeout(() => (status.textContent = text), 50);
}

function copySelected(text) {
  const focused = document.activeElement;
  const box = h("textarea", { class: "unseen", "aria-hidden": "true" });
  box.value = text;
  document.body.append(box);
  box.select();
  const done = document.execCommand("copy");
  box.remove();
  focused?.focus();
  return done;
}

/** Copy, and show on the button that it was done. */
export async function copy(text, button) {
  const use = button.querySelector("use");
  const before = use.getAttribute("href");
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Browsers offer the clipboard only to HTTPS and to this machine; other pages have the old way.
    if (!copySelected(text)) {
      announce("The browser did not allow the page to copy the text.");
      return;
    }
  }
  use.setAttribute("href", "#i-check");
  announce("Copied.");
  setTimeout(() => use.setAttribute("href", before), 1500);
}
