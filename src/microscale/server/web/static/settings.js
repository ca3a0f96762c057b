// How answers are requested. The settings are kept in this browser, except for the API key.

import { getKey, setKey } from "/web/api.js";
import { $, h, keep, recall } from "/web/dom.js";

const DEFAULTS = { effort: "medium", system: "", temperature: "", top_p: "", max_tokens: "", seed: "", tools: "" };
const FIELDS = ["system", "temperature", "top_p", "max_tokens", "seed", "tools"];
const SLIDERS = ["temperature", "top_p"];
const EFFORTS = ["low", "medium", "high"];
// Each number: what it may be, as code and in words. An empty text is left to the server.
const NUMBERS = {
  temperature: [(n) => n >= 0 && n <= 2, "Temperature must be a number from 0 to 2."],
  top_p: [(n) => n > 0 && n <= 1, "Top p must be a number above 0, up to 1."],
  max_tokens: [(n) => Number.isSafeInteger(n) && n >= 1, "Maximum tokens must be a whole number from 1."],
  seed: [(n) => Number.isSafeInteger(n) && n >= 0, "The seed must be a whole number from 0."],
};

function load() {
  let kept = {};
  try {
    kept = JSON.parse(recall("localStorage", "settings")) ?? {};
  } catch {
    // They cannot be read: the defaults are used.
  }
  const loaded = Object.fromEntries(Object.entries(DEFAULTS).map(([name, value]) => [name, ["string", "number"].includes(typeof kept[name]) ? String(kept[name]) : value]));
  for (const name of Object.keys(NUMBERS)) if (problem(name, loaded)) loaded[name] = DEFAULTS[name];
  if (!EFFORTS.includes(loaded.effort)) loaded.effort = DEFAULTS.effort;
  return loaded;
}

function loadOffered() {
  try {
    return JSON.parse(recall("sessionStorage", "offered") ?? "[]");
  } catch {
    return [];
  }
}

let settings = load();
let offered = loadOffered(); // functions of an example, for the chat that began with it

/** A sentence if the text of a setting cannot be used, or an empty text. */
function problem(name, { [name]: text }) {
  if (name === "tools") {
    try {
      tools(text);
    } catch (error) {
      return error.message;
    }
  }
  const [allowed, sentence] = NUMBERS[name] ?? [];
  return allowed && text !== "" && !allowed(Number(text)) ? sentence : "";
}

/** The functions that the model may call; throws a sentence if the text is not a list of them. */
function tools(text) {
  if (!text.trim()) return [];
  let list;
  try {
    list = JSON.parse(text);
  } catch (error) {
    throw new Error(`Tools are not JSON: ${error.message}.`);
  }
  if (!Array.isArray(list)) throw new Error("Tools must be a list: put them in [ ].");
  if (!list.every((tool) => typeof tool?.function?.name === "string")) throw new Error('Each tool needs "function": {"name": …}.');
  return list;
}

/** The fields of a request, without the conversation. Throws a sentence if a setting is wrong. */
export function fields() {
  const wrong = FIELDS.map((name) => problem(name, settings)).find(Boolean);
  if (wrong) throw new Error(`${wrong} Correct it in the settings.`);
  const body = { reasoning_effort: settings.effort };
  for (const name of Object.keys(NUMBERS)) if (settings[name] !== "") body[name] = Number(settings[name]);
  const own = tools(settings.tools);
  const names = own.map((tool) => tool.function.name);
  const all = [...own, ...offered.filter((tool) => !names.includes(tool.function.name))];
  if (all.length) body.tools = all;
  return body;
}

/** Let the model call these functions until the next offer, or none. They belong to a chat, not to the settings. */
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
  for (const name of FIELDS) {
    const field = $(`set-${name}`);
    // Not while it is typed: "1." is a number field's way to 1.5.
    if (field !== document.activeElement && field.value !== settings[name]) field.value = settings[name];
    const wrong = problem(name, settings);
    field.setAttribute("aria-invalid", String(Boolean(wrong)));
    const place = $(`error-${name}`);
    if (place && place.textContent !== wrong) place.textContent = wrong;
  }
  for (const name of SLIDERS) $(`slide-${name}`).value = settings[name] || 1;
  for (const radio of document.querySelectorAll("#effort input")) radio.checked = radio.value === settings.effort;
  // Settings that would otherwise be invisible while the drawer is closed.
  const count = problem("tools", settings) ? 0 : tools(settings.tools).length;
  const badges = [];
  if (systemPrompt()) badges.push("system prompt");
  if (count) badges.push(count === 1 ? "1 tool" : `${count} tools`);
  for (const tool of offered) badges.push(`${tool.function.name}, in this chat`);
  $("badges").replaceChildren(...badges.map((text) => h("span", {}, text)));
}

export function startSettings() {
  for (const name of FIELDS) {
    $(`set-${name}`).addEventListener("input", ({ target }) => {
      // A number field gives an empty text for what is not a number.
      save({ [name]: target.validity.badInput ? "not a number" : target.value });
    });
  }
  for (const name of SLIDERS) $(`slide-${name}`).addEventListener("input", (event) => save({ [name]: event.target.value }));
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
  // A click next to the drawer closes it.
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) dialog.close();
  });
  show();
}
