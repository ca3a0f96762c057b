// Where everything meets: views, colours, the key, and what is known of the server.

import { getJson, getKey, setKey } from "/web/api.js";
import { Chat } from "/web/chat.js";
import { $, h, icon, keep, recall } from "/web/dom.js";
import { Running } from "/web/running.js";
import { startSettings } from "/web/settings.js";

const number = new Intl.NumberFormat("en");
const THEMES = { auto: "Colours: as the system's", light: "Colours: light", dark: "Colours: dark" };
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
  document.title = view === "running" ? "What is running · Microscale" : "Microscale";
  running.setOpen(view === "running");
}

// ---- errors and the key ---------------------------------------------------------------------------------------------

let unsent = null; // sends again what failed

/** A sentence above the message box, with a way to try again, or nothing. A key that is missing is asked for by a dialog. */
function showError(error, retry = null) {
  unsent = retry;
  if (error?.status === 401) askKey();
  $("banner").hidden = error === null || (error.status === 401 && !retry);
  $("banner").replaceChildren(h("span", {}, error?.message ?? ""), retry ? retryButton(retry) : "");
}

const retryButton = (retry) => h("button", { type: "button", class: "ghost labelled", onclick: retry }, icon("retry"), "Try again");

function askKey() {
  const dialog = $("ask-key");
  if (dialog.open) return; // it may hold half a key by now
  $("key-error").textContent = getKey() ? "The server does not know this key." : "";
  $("key").value = "";
  dialog.showModal();
}

$("key-form").addEventListener("submit", () => {
  setKey($("key").value);
  meetServer();
});

async function meetServer() {
  try {
    const [models] = await Promise.all([getJson("/v1/models")]);
    const model = models.data[0];
    $("model").textContent = model.id;
    $("facts").textContent = `${model.id}, with room for ${number.format(model.max_model_len)} tokens`;
    chat.showModel(model.id);
    showError(unsent && new Error("The server is there. Your message was not sent yet."), unsent);
    running.load();
  } catch (error) {
    showError(error);
    // A server that restarts is found again.
    if (error.status === 0 || error.status === 503) setTimeout(meetServer, 3000);
  }
}

// ---- start ----------------------------------------------------------------------------------------------------------

const running = new Running({ onError: (error) => error.status === 401 && askKey(), onBack: meetServer });
startSettings();
const chat = new Chat({ onError: showError, onBusy: (busy) => running.setBusy(busy) });

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
if (recall("sessionStorage", "chat") === null) document.body.classList.add("fresh");
