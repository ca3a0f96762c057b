// What the user wants of answers. Kept in this browser; the API key is not among it.

import { getKey, setKey } from "/web/api.js";
import { $, keep, recall } from "/web/dom.js";

const DEFAULTS = { effort: "medium", system: "", temperature: 1, top_p: 1, max_tokens: "", seed: "", tools: "" };
const FIELDS = ["system", "temperature", "top_p", "max_tokens", "seed", "tools"];
const SLIDERS = ["temperature", "top_p"];

function load() {
  try {
    const kept = JSON.parse(recall("localStorage", "settings") ?? "{}");
    return Object.fromEntries(Object.entries(DEFAULTS).map(([name, value]) => [name, typeof kept[name] === typeof value ? kept[name] : value]));
  } catch {
    return { ...DEFAULTS };
  }
}

function loadOffered() {
  try {
    return JSON.parse(recall("sessionStorage", "offered") ?? "[]");
  } catch {
    return [];
  }
}

let settings = load();
let offered = loadOffered(); // functions of an example, in the chat that it began

/** The functions that the model may call; throws a sentence where the text is no list of them. */
function tools() {
  if (!settings.tools.trim()) return [];
  let list;
  try {
    list = JSON.parse(settings.tools);
  } catch (error) {
    throw new Error(`Tools are not JSON: ${error.message}.`);
  }
  if (!Array.isArray(list)) throw new Error("Tools are a list: put them in [ ].");
  if (!list.every((tool) => typeof tool?.function?.name === "string")) throw new Error('Each tool needs "function": {"name": …}.');
  return list;
}

/** A request's fields, but for the conversation. */
export function fields() {
  const body = { reasoning_effort: settings.effort, temperature: settings.temperature, top_p: settings.top_p };
  if (settings.max_tokens !== "") body.max_tokens = Number(settings.max_tokens);
  if (settings.seed !== "") body.seed = Number(settings.seed);
  const own = tools();
  const names = own.map((tool) => tool.function.name);
  const all = [...own, ...offered.filter((tool) => !names.includes(tool.function.name))];
  if (all.length) body.tools = all;
  return body;
}

/** Let the model call these functions until the next offer, or none: they belong to a chat, not to the settings. */
export function offerTools(list) {
  offered = list;
  keep("sessionStorage", "offered", list.length ? JSON.stringify(list) : null);
  show();
}

export const systemPrompt = () => settings.system.trim();

function save(changed) {
  settings = { ...settings, ...changed };
  keep("localStorage", "settings", JSON.stringify(settings));
  show();
}

function show() {
  for (const name of FIELDS) if (String($(`set-${name}`).value) !== String(settings[name])) $(`set-${name}`).value = settings[name];
  for (const name of SLIDERS) $(`out-${name}`).textContent = settings[name].toFixed(2);
  for (const radio of document.querySelectorAll("#effort input")) radio.checked = radio.value === settings.effort;
  let count = 0;
  try {
    count = tools().length;
    $("tools-error").textContent = "";
  } catch (error) {
    $("tools-error").textContent = error.message;
  }
  $("set-tools").setAttribute("aria-invalid", String($("tools-error").textContent !== ""));
  // What is set, but not seen while the drawer is closed.
  const badges = [];
  if (systemPrompt()) badges.push("system prompt");
  if (count) badges.push(count === 1 ? "1 tool" : `${count} tools`);
  for (const tool of offered) badges.push(`${tool.function.name}, in this chat`);
  $("badges").replaceChildren(...badges.map((text) => Object.assign(document.createElement("span"), { textContent: text })));
}

export function startSettings() {
  for (const name of FIELDS) {
    $(`set-${name}`).addEventListener("input", (event) => {
      save({ [name]: SLIDERS.includes(name) ? Number(event.target.value) : event.target.value });
    });
  }
  $("effort").addEventListener("change", (event) => save({ effort: event.target.value }));
  $("reset").addEventListener("click", () => {
    offerTools([]);
    save({ ...DEFAULTS });
  });
  const dialog = $("settings");
  $("open-settings").addEventListener("click", () => {
    $("set-key").value = getKey();
    dialog.showModal();
  });
  $("set-key").addEventListener("change", (event) => setKey(event.target.value));
  // A click beside the drawer closes it.
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) dialog.close();
  });
  show();
}
