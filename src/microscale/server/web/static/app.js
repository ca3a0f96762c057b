// Connects the parts: views, colours, the key, and what the server says about itself.

import { getJson, getKey, setKey } from "/web/api.js";
import { Chat } from "/web/chat.js";
import { Chats } from "/web/chats.js";
import { $, h, icon, keep } from "/web/dom.js";
import { Running } from "/web/running.js";
import { offerTools, startSettings } from "/web/settings.js";

const number = new Intl.NumberFormat("en");
const THEMES = { auto: "Colours: as in the system", light: "Colours: light", dark: "Colours: dark" };
const ICONS = { auto: "auto", light: "sun", dark: "moon" };

// ---- colours --------------------------------------------------------------------------------------------------------

function showTheme() {
  const theme = document.documentElement.dataset.theme ?? "auto";
  const button = $("theme");
  button.querySelector("use").setAttribute("href", `#i-${ICONS[theme]}`);
  button.setAttribute("aria-label", THEMES[theme]);
  button.title = THEMES[theme];
}

function nextTheme() {
  const names = Object.keys(THEMES);
  const theme = names[(names.indexOf(document.documentElement.dataset.theme ?? "auto") + 1) % names.length];
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  keep("localStorage", "theme", theme === "auto" ? null : theme);
  showTheme();
}

// ---- views ----------------------------------------------------------------------------------------------------------

function showView() {
  const view = location.hash === "#running" ? "running" : "chat";
  for (const name of ["chat", "running"]) $(name).hidden = name !== view;
  for (const tab of document.querySelectorAll(".tabs a")) {
    if (tab.dataset.view === view) tab.setAttribute("aria-current", "page");
    else tab.removeAttribute("aria-current");
  }
  $("open-chats").hidden = view === "running";
  document.title = view === "running" ? "What is running · Microscale" : "Microscale";
  running.setOpen(view === "running");
}

// ---- errors and the key ---------------------------------------------------------------------------------------------

let unsent = null; // sends again what failed

/** Show a sentence above the message box, with or without a button to try again; null hides it. A dialog asks for a missing key. */
function showError(error, retry = null) {
  unsent = retry;
  if (error?.status === 401) askKey();
  $("banner").hidden = error === null || (error.status === 401 && !retry);
  $("banner").replaceChildren(h("span", {}, error?.message ?? ""), retry ? retryButton(retry) : "");
}

const retryButton = (retry) => h("button", { type: "button", class: "ghost labelled", onclick: retry }, icon("retry"), "Try again");

function askKey() {
  const dialog = $("ask-key");
  if (dialog.open) return; // the user may be typing a key
  $("key-error").textContent = getKey() ? "The server does not accept this key." : "";
  $("key").value = "";
  dialog.showModal();
}

$("key-form").addEventListener("submit", () => {
  setKey($("key").value);
  meetServer();
});

async function meetServer() {
  try {
    const models = await getJson("/v1/models");
    const model = models.data[0];
    $("model").textContent = model.id;
    $("facts").textContent = `${model.id} has a context of ${number.format(model.max_model_len)} tokens.`;
    chat.showModel(model.id, model.max_model_len);
    showError(unsent && new Error("The server can be reached again. Your message was not sent yet."), unsent);
    running.load();
  } catch (error) {
    showError(error);
    // The server may be restarting.
    if (error.status === 0 || error.status === 503) setTimeout(meetServer, 3000);
  }
}

// ---- start ----------------------------------------------------------------------------------------------------------

const running = new Running({ onError: (error) => error.status === 401 && askKey(), onBack: meetServer });
startSettings();
const chat = new Chat({ onError: showError, onBusy: (busy) => running.setBusy(busy), onChange: (conversation) => chats.save(conversation) });
const chats = new Chats(chat, () => {
  offerTools([]); // the functions of an example belong to its chat
  if (location.hash === "#running") location.hash = "#chat";
});

$("theme").addEventListener("click", nextTheme);
$("set-key").addEventListener("change", meetServer);
window.addEventListener("hashchange", () => {
  showView();
  $(location.hash === "#running" ? "running-title" : "prompt").focus();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && chat.busy && !document.querySelector("dialog[open]")) chat.stop();
  // A letter typed anywhere goes into the message box.
  const typing = event.target.closest("input, textarea, dialog, button, a, summary, [tabindex='0']");
  if (!typing && event.key.length === 1 && !event.ctrlKey && !event.metaKey && !event.altKey && event.key !== " " && !$("chat").hidden) $("prompt").focus();
});
showTheme();
showView();
meetServer();
if (location.hash !== "#running") $("prompt").focus();
