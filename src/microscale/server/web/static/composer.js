// The message box: text, attached files, and whether it edits a message that was sent before.

import { $, announce } from "/web/dom.js";
import { chip, withFiles } from "/web/files.js";

export class Composer {
  constructor({ onSend, onStop, onProblem, onEditing }) {
    this.files = [];
    this.editing = null; // the message, while one is edited
    this.draft = null; // what was in the box before
    this.onProblem = onProblem;
    this.onEditing = onEditing;
    this.busy = false;
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.busy) onStop();
      else onSend();
    });
    $("prompt").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.busy) onSend();
    });
    $("prompt").addEventListener("input", () => this.grow());
    window.addEventListener("resize", () => this.grow());
    $("attach").addEventListener("click", () => $("choose-files").click());
    $("choose-files").addEventListener("change", async (event) => {
      const chosen = [...event.target.files];
      event.target.value = ""; // so that the same file can be chosen again
      await this.attach(chosen);
    });
    $("cancel-edit").addEventListener("click", () => this.cancelEdit());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.editing && !event.isComposing && !document.querySelector("dialog[open]")) this.cancelEdit();
    });
    this.acceptDrops($("chat"));
  }

  acceptDrops(element) {
    const holdsFiles = (event) => event.dataTransfer?.types.includes("Files");
    element.addEventListener("dragover", (event) => {
      if (!holdsFiles(event)) return;
      event.preventDefault();
      $("composer").classList.add("drop");
    });
    element.addEventListener("dragleave", () => $("composer").classList.remove("drop"));
    element.addEventListener("drop", (event) => {
      $("composer").classList.remove("drop");
      if (!holdsFiles(event)) return;
      event.preventDefault();
      this.attach([...event.dataTransfer.files]);
    });
    $("prompt").addEventListener("paste", (event) => {
      if (!event.clipboardData?.files.length) return;
      event.preventDefault();
      this.attach([...event.clipboardData.files]);
    });
  }

  get empty() {
    return !$("prompt").value.trim() && !this.files.length;
  }

  /** What is in the box now. */
  get content() {
    return { text: $("prompt").value.trim(), files: this.files, editing: this.editing };
  }

  put({ text = "", files = [], editing = null }) {
    $("prompt").value = text;
    this.files = files;
    this.setEditing(editing);
    this.showFiles();
    this.grow();
  }

  clear() {
    this.draft = null;
    this.put({});
  }

  async attach(chosen) {
    const { files, problems } = await withFiles(this.files, chosen);
    if (files.length > this.files.length) announce(files.length === 1 ? "1 file is attached." : `${files.length} files are attached.`);
    this.files = files;
    this.showFiles();
    this.onProblem(problems.length ? new Error(problems.join(" ")) : null);
    $("prompt").focus();
  }

  showFiles() {
    $("files").hidden = !this.files.length;
    $("files").replaceChildren(...this.files.map((file) => chip(file, () => {
      this.files = this.files.filter((other) => other !== file);
      this.showFiles();
      announce(`${file.name} was removed.`);
      $("prompt").focus();
    })));
  }

  // ---- editing --------------------------------------------------------------------------------------------------------

  edit(message) {
    if (!this.editing) this.draft = this.content;
    this.put({ text: message.content, files: message.files ?? [], editing: message });
    $("prompt").focus();
    announce("You are editing an earlier message. Escape cancels.");
  }

  /** Back to what was in the box before. */
  cancelEdit() {
    if (!this.editing) return;
    this.put({ ...this.draft, editing: null });
    this.draft = null;
    announce("The message was not changed.");
    $("prompt").focus();
  }

  setEditing(message) {
    this.editing = message;
    $("editing").hidden = !message;
    this.onEditing(message);
  }

  /** The box is as high as its text, up to a third of the window. */
  grow() {
    const box = $("prompt");
    box.style.height = "auto";
    box.style.height = `${Math.min(box.scrollHeight, window.innerHeight / 3)}px`;
  }
}
