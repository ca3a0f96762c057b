// The list of conversations: stored, renamed, deleted with undo, exported and imported. On phones it is a drawer.

import { $, announce, h, icon, keep, recall } from "/web/dom.js";
import { MOST, openStore } from "/web/store.js";
import { download, readExport } from "/web/transfer.js";
import { fromJson } from "/web/tree.js";

const UNDO_MS = 20_000;
const phone = window.matchMedia("(max-width: 900px)");

export class Chats {
  /** `chat` shows conversations. `onSwitch` is called before the user gets another one. */
  constructor(chat, onSwitch) {
    this.chat = chat;
    this.onSwitch = onSwitch;
    this.list = [];
    this.rows = new Map(); // by the conversation's id
    this.removed = null; // what an undo brings back
    this.work = openStore().then((store) => (this.store = store)); // all reads and writes, one after the other
    this.others = "BroadcastChannel" in window ? new BroadcastChannel("microscale") : null;
    if (this.others) this.others.onmessage = ({ data }) => this.follow(data);
    $("new").addEventListener("click", () => this.startNew());
    $("export").addEventListener("click", () => this.exportAll());
    $("import").addEventListener("click", () => $("choose-import").click());
    $("choose-import").addEventListener("change", (event) => {
      const [file] = event.target.files;
      event.target.value = "";
      if (file) this.import(file);
    });
    $("undo").addEventListener("click", () => this.undo());
    $("open-chats").addEventListener("click", () => this.toggle());
    $("close-chats").addEventListener("click", () => this.toggle(false));
    $("chats-drawer").addEventListener("click", (event) => event.target === $("chats-drawer") && this.toggle(false));
    $("chats-drawer").addEventListener("close", () => $("open-chats").setAttribute("aria-expanded", "false"));
    phone.addEventListener("change", () => this.place());
    this.place();
    this.start();
  }

  /** Do something with the store after what was asked before. A failure is shown, and returns undefined. */
  withStore(action) {
    this.work = this.work.then(() => action(this.store)).catch((error) => {
      this.note(error?.name === "QuotaExceededError"
        ? "The browser has no room left for conversations. Export some and delete them."
        : `The browser could not store or read a conversation: ${error?.message ?? error}.`);
    });
    return this.work;
  }

  async start() {
    await this.refresh();
    if (!this.store.lasts) $("chats-about").textContent = "This browser does not store conversations, perhaps because the window is private. They are kept until this tab is closed.";
    else $("chats-about").textContent = `Stored in this browser only: the ${MOST} most recent conversations.`;
    const id = recall("sessionStorage", "open");
    if (id && !this.chat.turns.length) await this.show(id);
    document.body.dataset.ready = "";
  }

  async refresh() {
    this.list = (await this.withStore((store) => store.list())) ?? this.list;
    this.render();
  }

  /** Another tab changed something. */
  async follow(id) {
    await this.refresh();
    const { chat } = this;
    if (chat.conversation.id === id && !chat.busy && chat.composer.empty) await this.show(id);
  }

  // ---- one conversation -----------------------------------------------------------------------------------------------

  /** Store a conversation after a change; one without messages is removed. */
  async save(conversation) {
    if (conversation.removed) return;
    const { id, name } = conversation;
    const empty = conversation.messages.size === 0;
    await this.withStore((store) => (empty ? store.remove(id) : store.save(conversation.toJson(), name)));
    if (this.chat.conversation === conversation) keep("sessionStorage", "open", empty ? null : id);
    this.others?.postMessage(id);
    await this.refresh();
  }

  async load(id) {
    const json = await this.withStore((store) => store.load(id));
    try {
      return json ? fromJson(json) : null;
    } catch (error) {
      this.note(error.message);
      return null;
    }
  }

  async show(id) {
    const conversation = await this.load(id);
    if (!conversation) return;
    this.chat.open(conversation);
    keep("sessionStorage", "open", id);
    this.render();
  }

  /** The user wants to see a conversation. */
  async choose(id) {
    if (this.chat.conversation.id !== id) {
      this.onSwitch();
      await this.show(id);
    }
    // On phones, focus in the message box would open the keyboard over the conversation.
    if (phone.matches) this.toggle(false);
    else $("prompt").focus();
  }

  startNew() {
    this.onSwitch();
    this.chat.open();
    keep("sessionStorage", "open", null);
    this.render();
    if (phone.matches) this.toggle(false);
    $("prompt").focus();
    announce("This is a new chat.");
  }

  async rename(id, title) {
    const open = this.chat.conversation;
    const conversation = open.id === id ? open : await this.load(id);
    if (!conversation) return;
    conversation.title = title;
    await this.save(conversation);
  }

  async remove(id) {
    const conversation = await this.load(id);
    if (!conversation) return;
    const wasOpen = this.chat.conversation.id === id;
    if (wasOpen) {
      this.chat.conversation.removed = true; // an answer in progress must not store it again
      this.onSwitch();
      this.chat.open();
      keep("sessionStorage", "open", null);
    }
    await this.withStore((store) => store.remove(id));
    this.others?.postMessage(id);
    await this.refresh();
    this.removed = { conversation, wasOpen };
    this.note(`“${conversation.name}” was deleted.`, true);
    $("undo").focus();
    this.forgetLater();
  }

  /** The way to undo goes after a while, but not while it has the focus. */
  forgetLater() {
    clearTimeout(this.undoTimer);
    this.undoTimer = setTimeout(() => (document.activeElement === $("undo") ? this.forgetLater() : this.note("")), UNDO_MS);
  }

  async undo() {
    const { conversation, wasOpen } = this.removed;
    this.note("");
    await this.save(conversation);
    if (wasOpen && !this.chat.turns.length) await this.show(conversation.id);
    this.rows.get(conversation.id)?.querySelector(".open").focus();
    announce("The conversation is back.");
  }

  /** A sentence above the list, with or without a way to undo. */
  note(text, undo = false) {
    if (!undo) this.removed = null;
    $("chats-note").hidden = !text;
    $("chats-note-text").textContent = text;
    $("undo").hidden = !undo;
    if (text) announce(text);
  }

  // ---- files ----------------------------------------------------------------------------------------------------------

  async exportAll() {
    const conversations = [];
    for (const { id } of this.list) conversations.push(await this.load(id));
    this.download(conversations.filter(Boolean), "microscale-conversations");
  }

  download(conversations, name) {
    if (!conversations.length) return this.note("There is nothing to export yet.");
    download(conversations, name);
    announce(conversations.length === 1 ? "The conversation was exported." : `${conversations.length} conversations were exported.`);
  }

  async import(file) {
    let conversations;
    try {
      conversations = await readExport(file);
    } catch (error) {
      this.note(`${file.name} was not imported. ${error.message}`);
      return;
    }
    const here = new Set(this.list.map(({ id }) => id));
    const unknown = conversations.filter(({ id }) => !here.has(id));
    const added = unknown.slice(0, Math.max(MOST - here.size, 0)); // an import removes nothing
    for (const conversation of added) await this.withStore((store) => store.save(conversation.toJson(), conversation.name));
    await this.refresh();
    const were = (count, what) => `${count} ${count === 1 ? "was" : "were"} ${what}`;
    const parts = [added.length === 1 ? "1 conversation was imported" : `${added.length} conversations were imported`];
    if (conversations.length > unknown.length) parts.push(were(conversations.length - unknown.length, "here already"));
    if (unknown.length > added.length) parts.push(were(unknown.length - added.length, `left out because the list holds ${MOST}`));
    this.note(`${parts.join("; ")}.`);
  }

  // ---- what is shown --------------------------------------------------------------------------------------------------

  render() {
    if (document.querySelector("#chats-list form")) return; // a title is being edited
    const focused = document.activeElement;
    const current = this.chat.conversation.id;
    for (const [id, row] of this.rows) {
      if (this.list.some((entry) => entry.id === id)) continue;
      row.remove();
      this.rows.delete(id);
    }
    const rows = this.list.map((entry) => {
      const row = this.rows.get(entry.id) ?? this.row(entry.id);
      this.rows.set(entry.id, row);
      const open = row.querySelector(".open");
      if (open.textContent !== entry.name) this.setName(row, entry.name);
      if (entry.id === current) open.setAttribute("aria-current", "true");
      else open.removeAttribute("aria-current");
      return row;
    });
    if (rows.some((row, i) => $("chats-list").children[i] !== row)) {
      $("chats-list").replaceChildren(...rows);
      if ($("chats-list").contains(focused)) focused.focus();
    }
    $("chats-none").hidden = rows.length > 0;
    $("export").disabled = rows.length === 0;
  }

  row(id) {
    const button = (name, action) => h("button", { type: "button", class: `ghost small ${name}`, onclick: action }, icon({ rename: "edit", export: "download", remove: "trash" }[name]));
    return h("li", {},
      h("button", { type: "button", class: "open", onclick: () => this.choose(id) }),
      h("span", { class: "row-actions" },
        button("rename", () => this.askName(id)),
        button("export", async () => this.download([await this.load(id)].filter(Boolean), "microscale-conversation")),
        button("remove", () => this.remove(id))));
  }

  setName(row, name) {
    row.querySelector(".open").textContent = name;
    row.querySelector(".open").title = name;
    for (const [part, verb] of [["rename", "Rename"], ["export", "Export"], ["remove", "Delete"]]) {
      row.querySelector(`.${part}`).setAttribute("aria-label", `${verb} “${name}”`);
      row.querySelector(`.${part}`).title = verb;
    }
  }

  /** A field in place of the title: Enter keeps the new one, Escape the old one. */
  askName(id) {
    const row = this.rows.get(id);
    const open = row.querySelector(".open");
    const field = h("input", { type: "text", maxlength: 80, "aria-label": "New title", autocomplete: "off" });
    field.value = open.textContent;
    let ended = false;
    const end = (save, byKey = true) => {
      if (ended) return;
      ended = true;
      form.replaceWith(open);
      row.classList.remove("renaming");
      if (save && field.value.trim() !== open.textContent) this.rename(id, field.value.trim());
      this.render();
      if (byKey) open.focus();
    };
    const form = h("form", { onsubmit: (event) => (event.preventDefault(), end(true)) }, field);
    field.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || event.isComposing) return;
      event.preventDefault();
      event.stopPropagation();
      end(false);
    });
    field.addEventListener("blur", () => end(true, false));
    open.replaceWith(form);
    row.classList.add("renaming");
    field.select();
    field.focus();
  }

  /** On phones the list is a drawer over the page; elsewhere it is next to the chat. */
  place() {
    if ($("chats-drawer").open) $("chats-drawer").close();
    (phone.matches ? $("chats-drawer") : $("chats-side")).append($("chats"));
    $("chats-side").hidden = phone.matches || recall("localStorage", "list") === "closed";
    $("open-chats").setAttribute("aria-expanded", String(!$("chats-side").hidden));
  }

  toggle(show = phone.matches ? true : $("chats-side").hidden) {
    $("open-chats").setAttribute("aria-expanded", String(show));
    if (phone.matches) {
      if (show) $("chats-drawer").showModal();
      else $("chats-drawer").close();
      return;
    }
    $("chats-side").hidden = !show;
    keep("localStorage", "list", show ? null : "closed");
    $("open-chats").focus();
  }
}
