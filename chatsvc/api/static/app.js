// The chat page: what is shown, and what happens when something is pressed.

import { Api, ApiError } from "./api.js";
import { Door } from "./door.js";
import { Sidebar } from "./sidebar.js";
import { Settings } from "./settings.js";
import { lastLeaf, newestLeaf, pathTo, siblings } from "./tree.js";
import { TurnGone, TurnReader, whyNotNow } from "./turn.js";
import { MessageView } from "./view.js";

const $ = (id) => document.getElementById(id);
const IDEAS = [
  "Explain how a rainbow forms, for a curious child.",
  "Write a short letter to my future self.",
  "What should I look at when I buy a used bicycle?",
  "Show me a Python function that finds prime numbers.",
];
const STOP_WAIT = 3000; // ms that a stopped answer may take to end by itself

class Page {
  constructor() {
    this.settings = new Settings($("settings"));
    this.door = new Door($("door"), this.settings);
    this.api = new Api(() => this.settings.apiKey, (refused) => this.door.ask(refused));
    this.session = null; // as the server has it; null: a new chat
    this.leaf = null; // the last message that is shown
    this.views = [];
    this.turn = null; // the TurnReader of the answer under way
    this.parent = undefined; // where an edited message goes; undefined: not editing
    this.unsent = ""; // the words of the last message, until the server has taken them
    this.epoch = 0; // counts conversations shown, so that late answers of one left do nothing
    this.actions = {
      branches: (m) => {
        const all = siblings(this.session?.messages || [], m);
        return [all.findIndex((s) => s.id === m.id) + 1, all.length];
      },
      branch: (m, step) => this.showBranch(m, step),
      edit: (m) => this.edit(m),
      redo: (m) => this.redo(m),
      fork: (m) => this.fork(m),
    };
    this.sidebar = new Sidebar(this.api, {
      open: (id) => this.go(id),
      removed: (id) => this.session?.id === id && this.go(""),
      failed: (error) => this.banner(error.message),
    });
    this.bind();
  }

  async start() {
    await this.waitReady();
    this.sidebar.refresh();
    this.api.models().then((m) => ($("model").textContent = m.data?.[0]?.id || ""), () => {});
    await this.open(location.hash.slice(1));
  }

  async waitReady() {
    for (let wait = 300; ; wait = Math.min(wait * 1.5, 3000)) {
      const ready = await this.api.ready();
      if (ready) break;
      this.banner(ready === null ? "The server cannot be reached. Trying again…" : "The model is loading…");
      await new Promise((resolve) => setTimeout(resolve, wait));
    }
    this.banner("");
  }

  bind() {
    const input = $("input");
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.submit();
      }
    });
    input.addEventListener("input", () => this.grow());
    document.addEventListener("keydown", (event) => this.key(event));
    $("stop").addEventListener("click", () => this.stop());
    $("stop-editing").addEventListener("click", () => this.edit(null));
    $("new-chat").addEventListener("click", () => this.go(""));
    $("open-settings").addEventListener("click", () => this.openSettings());
    $("settings").addEventListener("close", () => this.saveSystem());
    $("scroll").addEventListener("scroll", () => this.showToEnd(), { passive: true });
    $("to-end").addEventListener("click", () => this.toEnd());
    window.addEventListener("hashchange", () => this.open(location.hash.slice(1)));
    document.addEventListener("visibilitychange", () => document.visibilityState === "visible" && this.refresh());
    window.addEventListener("online", () => this.refresh());
    this.bindTitle();
    for (const idea of IDEAS) {
      const node = document.createElement("button");
      node.type = "button";
      node.textContent = idea;
      node.addEventListener("click", () => this.send(idea));
      $("ideas").append(node);
    }
  }

  bindTitle() {
    const title = $("title");
    const finish = async (keep) => {
      if (!title.isContentEditable) return;
      const text = title.textContent.replace(/\s+/g, " ").trim().slice(0, 200);
      title.removeAttribute("contenteditable");
      if (keep && text && this.session && text !== this.session.title) {
        this.session.title = text;
        await this.api.patch(this.session.id, { title: text }).catch((e) => this.banner(e.message));
        this.sidebar.refresh();
      }
      this.showTitle();
    };
    const begin = () => {
      if (!this.session || title.isContentEditable) return;
      title.setAttribute("contenteditable", "plaintext-only");
      title.focus();
      getSelection().selectAllChildren(title);
    };
    title.addEventListener("dblclick", begin);
    title.addEventListener("blur", () => finish(true));
    title.addEventListener("keydown", (event) => {
      if (!title.isContentEditable && event.key === "Enter") begin();
      else if (event.key === "Enter" || event.key === "Escape") finish(event.key === "Enter");
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
  }

  key(event) {
    if (event.key === "Escape" && this.turn && !document.querySelector("dialog[open]")) this.stop();
    if (event.key.toLowerCase() === "o" && event.shiftKey && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      this.go("");
    }
    const typing = event.target.closest?.("input, textarea, select, [contenteditable]");
    if (event.key === "/" && !typing) {
      event.preventDefault();
      $("input").focus();
    }
  }

  // -- conversations ---------------------------------------------------------------------------------------------

  go(id) {
    if (location.hash.slice(1) === id) this.open(id);
    else location.hash = id; // the hashchange opens it, and Back works
  }

  /** Shows a conversation; an answer that runs goes on here. "" is a new one. */
  async open(id) {
    if (id && id === this.session?.id && this.turn) return;
    const epoch = ++this.epoch;
    this.turn?.stop(); // reading only; the server goes on
    this.turn = null;
    this.edit(null);
    this.sidebar.mark(id);
    let session = null;
    if (id) {
      try {
        session = await this.api.session(id);
      } catch (error) {
        if (epoch !== this.epoch) return;
        if (id === this.session?.id && error.status !== 404) {
          this.busy(false); // what is shown stays
          this.views.at(-1)?.fail(error.message, "Try again", () => this.reload());
          return;
        }
        this.show(null);
        this.banner(error.status === 404 ? "This conversation is gone." : error.message);
        return;
      }
      if (epoch !== this.epoch) return;
    }
    this.banner("");
    this.show(session);
    if (!matchMedia("(pointer: coarse)").matches) $("input").focus();
    this.joinIfRunning();
  }

  /** After a while away: another tab may have gone on. */
  async refresh() {
    if (!this.session || this.turn) return;
    const epoch = this.epoch;
    let session;
    try {
      session = await this.api.session(this.session.id);
    } catch {
      return;
    }
    if (epoch !== this.epoch || this.turn || JSON.stringify(session) === JSON.stringify(this.session)) return;
    this.show(session);
    this.joinIfRunning();
  }

  show(session, leaf = session ? lastLeaf(session.messages) : null) {
    this.session = session;
    this.leaf = leaf;
    const path = session ? pathTo(session.messages, leaf) : [];
    this.views = path.map((m) => this.view(m));
    $("log").replaceChildren(...this.views.map((v) => v.node));
    const last = this.views.at(-1);
    if (last?.message.status === "failed") {
      last.fail("This answer failed.", "Try again", () => this.redo(last.message));
    } else if (last?.message.finish_reason === "length") {
      last.note("This answer was cut at the limit of its length.", "Go on", () => this.redo(last.message, true));
    }
    $("empty").hidden = path.length > 0;
    this.showTitle();
    this.busy(false);
    this.toEnd();
  }

  showTitle() {
    const title = this.session ? this.session.title || "Conversation" : "";
    $("title").textContent = title;
    document.title = title ? `${title} – chatsvc` : "chatsvc";
  }

  view(message) {
    const view = new MessageView(message, this.actions);
    view.onPaint = () => this.follow();
    return view;
  }

  showBranch(message, step) {
    if (this.turn) return;
    const all = siblings(this.session.messages, message);
    const other = all[all.findIndex((m) => m.id === message.id) + step];
    if (other) this.show(this.session, newestLeaf(this.session.messages, other.id));
  }

  async fork(message) {
    try {
      const made = await this.api.json("POST", `/v1/sessions/${this.session.id}/fork`, {
        body: { message_id: message.id },
      });
      this.sidebar.refresh();
      this.go(made.id);
    } catch (error) {
      this.banner(error.message);
    }
  }

  edit(message) {
    this.parent = message ? message.parent_id || "root" : undefined;
    $("editing").hidden = !message;
    if (message) {
      $("input").value = message.content;
      this.grow();
      $("input").focus();
    }
  }

  // -- turns -----------------------------------------------------------------------------------------------------

  submit() {
    const text = $("input").value.trim();
    if (!text) return;
    const why = whyNotNow(this.turn);
    if (why) this.banner(why);
    else this.send(text);
  }

  async send(text) {
    if (this.turn) return;
    const epoch = this.epoch;
    const parent = this.parent === undefined ? this.leaf : this.parent;
    this.unsent = text;
    $("input").value = "";
    this.grow();
    this.edit(null);
    const user = { id: "", parent_id: parent === "root" ? null : parent, role: "user", content: text, status: "done" };
    const shown = this.session ? pathTo(this.session.messages, user.parent_id) : [];
    this.views.length = shown.length;
    this.views.push(this.view(user));
    const open = async (signal) => {
      if (!this.session) {
        const title = text.replace(/\s+/g, " ").slice(0, 60);
        const session = await this.api.create({ title, system: $("system").value });
        if (epoch !== this.epoch) throw new DOMException("left", "AbortError");
        this.session = session;
        this.showTitle();
        history.replaceState(null, "", `#${session.id}`);
        this.sidebar.mark(session.id);
        this.sidebar.refresh();
        reader.sessionId = session.id;
      }
      const body = { content: text, ...(parent ? { parent_id: parent } : {}), ...this.settings.sampling() };
      return this.api.send(this.session.id, body, signal);
    };
    const reader = this.reader();
    await this.follows(reader, open, () => this.send(text));
  }

  /** Answers again, or goes on with an answer that was cut short. */
  async redo(message, goOn = false) {
    if (this.turn) return;
    const path = pathTo(this.session.messages, message.id);
    this.views.length = path.length - (message.role === "assistant" ? 1 : 0);
    const body = { ...this.settings.sampling(), ...(goOn ? { continue_final_message: true } : {}) };
    const open = (signal) => this.api.regenerate(this.session.id, message.id, body, signal);
    await this.follows(this.reader(), open, () => this.redo(message, goOn));
  }

  joinIfRunning() {
    const last = this.views.at(-1);
    if (last?.message.status !== "running") return;
    this.views.pop();
    this.join();
  }

  /** Reads the running turn from its start. */
  async join() {
    const reader = this.reader();
    await this.follows(reader, (signal) => this.api.rejoin(reader.sessionId, "", signal), () => this.reload());
  }

  reader() {
    const reader = new TurnReader(this.api, this.session?.id, ({ text, whole }) => text && this.answer.append(text, whole));
    reader.onLink = (lost) => reader === this.turn && this.banner(lost ? "Connection lost. Trying again…" : "");
    return reader;
  }

  /** Shows an answer while it comes. `retry` is what the button under an error does. */
  async follows(reader, open, retry) {
    const epoch = this.epoch;
    this.turn = reader;
    this.answer = this.view({ id: "", parent_id: null, role: "assistant", content: "", status: "running" });
    this.views.push(this.answer);
    $("log").replaceChildren(...this.views.map((v) => v.node));
    $("empty").hidden = true;
    this.banner("");
    this.busy(true);
    this.toEnd();
    let failed = null;
    try {
      await reader.run(open);
    } catch (error) {
      if (epoch !== this.epoch) return;
      if (!(error instanceof TurnGone)) failed = error;
    }
    if (epoch !== this.epoch) return;
    this.turn = null;
    this.banner("");
    await this.settle(reader, failed, retry);
  }

  /** The turn is over, well or not: show it as the server has stored it. */
  async settle(reader, failed, retry) {
    const epoch = this.epoch;
    const aborted = failed?.name === "AbortError";
    if (failed && !aborted && failed.status === 409 && failed.turnId) return this.elsewhere();
    const kept = failed && !aborted && !this.answer.message.content;
    let session = null;
    if (reader.sessionId) session = await this.api.session(reader.sessionId).catch(() => null);
    if (epoch !== this.epoch) return;
    if (session && !(kept && failed.status)) {
      this.show(session);
      const last = this.views.at(-1);
      if (failed && !aborted && last && last.message.status !== "done") {
        last.fail(failed.message, "Try again", () => this.redo(last.message));
        this.toEnd();
      }
      if (last?.message.status === "running") this.joinIfRunning();
    } else if (failed && !aborted) {
      this.answer.update({ status: "failed" });
      // What the server has begun to answer is not said to it a second time.
      const way = reader.lastId ? () => this.reload() : () => this.again(retry);
      this.answer.fail(failed.message, "Try again", way, failed.retryAfter);
      this.busy(false);
      this.toEnd();
    } else {
      this.answer.update({ status: "cancelled" });
      this.busy(false);
    }
    this.sidebar.refresh();
  }

  /** Another tab has a running answer in this conversation: show that one; our words wait in the box. */
  elsewhere() {
    this.answer.update({ status: "failed" });
    this.answer.fail("Another answer is running in this conversation.", "Show it", () => this.reload());
    $("input").value ||= this.unsent;
    this.grow();
    this.busy(false);
    this.toEnd();
  }

  again(retry) {
    this.views.splice(-2); // the question comes again with its answer
    retry();
  }

  reload() {
    const id = this.session?.id || "";
    this.turn?.stop();
    this.turn = null;
    return this.open(id);
  }

  /** Stops the answer on the server; the stream then ends by itself, and is cut only when it does not. */
  async stop() {
    const reader = this.turn;
    if (!reader || reader.stopping) return;
    reader.stopping = true;
    $("stop").disabled = true;
    setTimeout(() => reader.stop(), STOP_WAIT);
    if (!reader.sessionId) return reader.stop();
    try {
      await this.api.cancel(reader.sessionId);
    } catch {
      reader.stop();
    }
  }

  // -- small things ----------------------------------------------------------------------------------------------

  busy(on) {
    $("send").hidden = on;
    $("stop").hidden = !on;
    $("stop").disabled = false;
  }

  banner(text) {
    $("banner").textContent = text;
    $("banner").hidden = !text;
  }

  grow() {
    const input = $("input");
    if (CSS.supports("field-sizing", "content")) return;
    input.style.height = "auto";
    input.style.height = `${input.scrollHeight}px`;
  }

  get atEnd() {
    const box = $("scroll");
    return box.scrollHeight - box.scrollTop - box.clientHeight < 90;
  }

  follow() {
    if (this.turn && !$("to-end").dataset.away) $("scroll").scrollTop = $("scroll").scrollHeight;
  }

  toEnd() {
    $("scroll").scrollTop = $("scroll").scrollHeight;
    this.showToEnd();
  }

  showToEnd() {
    const away = !this.atEnd;
    $("to-end").hidden = !away;
    if (away) $("to-end").dataset.away = "yes";
    else delete $("to-end").dataset.away;
  }

  openSettings() {
    if (this.session) $("system").value = this.session.system;
    $("settings").showModal();
  }

  async saveSystem() {
    const system = $("system").value;
    if (!this.session || system === this.session.system) return;
    try {
      await this.api.patch(this.session.id, { system });
      this.session.system = system;
    } catch (error) {
      this.banner(error instanceof ApiError ? error.message : String(error));
    }
  }
}

new Page().start();
