// The list of conversations.

import { button } from "./view.js";

const DAY = 86_400;
const $ = (id) => document.getElementById(id);

export class Sidebar {
  /** @param {{open: (id: string) => void, removed: (id: string) => void, failed: (error: Error) => void}} on */
  constructor(api, on) {
    this.api = api;
    this.on = on;
    this.here = "";
    this.sessions = [];
    $("menu").addEventListener("click", () => this.slide(!$("sidebar").classList.contains("open")));
    $("scrim").addEventListener("click", () => this.slide(false));
    $("sidebar").addEventListener("keydown", (event) => event.key === "Escape" && this.slide(false));
  }

  slide(open) {
    $("sidebar").classList.toggle("open", open);
    $("scrim").hidden = !open;
    $("menu").setAttribute("aria-expanded", String(open));
    if (open) $("new-chat").focus();
  }

  mark(id) {
    this.here = id;
    this.slide(false);
    this.paint();
  }

  async refresh() {
    try {
      this.sessions = (await this.api.sessions()).data;
    } catch (error) {
      if (error.status) this.on.failed(error);
      return;
    }
    this.paint();
  }

  paint() {
    const now = Date.now() / 1000;
    const nodes = [];
    let group = "";
    for (const session of this.sessions) {
      const label = age(now, session.updated_at);
      if (label !== group) {
        const head = document.createElement("h2");
        head.textContent = group = label;
        nodes.push(head);
      }
      nodes.push(this.item(session));
    }
    $("list").replaceChildren(...nodes);
  }

  item(session) {
    const node = document.createElement("div");
    node.className = "item";
    const link = document.createElement("a");
    link.href = `#${session.id}`;
    link.textContent = session.title || "Conversation";
    link.title = link.textContent;
    link.addEventListener("click", (event) => {
      event.preventDefault();
      this.on.open(session.id);
    });
    if (session.id === this.here) {
      node.classList.add("here");
      link.setAttribute("aria-current", "page");
    }
    const remove = button(`Delete ${link.textContent}`, "trash", () => this.remove(session), "");
    node.append(link, remove);
    return node;
  }

  remove(session) {
    const dialog = $("confirm");
    $("confirm-text").textContent = `Delete “${session.title || "Conversation"}”? It cannot be brought back.`;
    dialog.returnValue = "";
    dialog.addEventListener(
      "close",
      async () => {
        if (dialog.returnValue !== "yes") return;
        try {
          await this.api.remove(session.id);
        } catch (error) {
          if (error.status !== 404) this.on.failed(error);
        }
        this.on.removed(session.id);
        this.refresh();
      },
      { once: true },
    );
    dialog.showModal();
  }
}

function age(now, then) {
  const midnight = new Date(now * 1000).setHours(0, 0, 0, 0) / 1000;
  if (then >= midnight) return "Today";
  if (then >= midnight - DAY) return "Yesterday";
  if (then >= midnight - 7 * DAY) return "This week";
  return "Earlier";
}
