// One message as DOM. All text goes in through textContent.

import { render } from "./markdown.js";

const SVG = "http://www.w3.org/2000/svg";
const PLAIN_ABOVE = 40_000; // characters of a running answer that are no longer laid out as Markdown at each frame

export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("aria-hidden", "true");
  svg.appendChild(document.createElementNS(SVG, "use")).setAttribute("href", `#i-${name}`);
  return svg;
}

export function button(label, iconName, onClick, className = "tool") {
  const node = document.createElement("button");
  node.type = "button";
  node.className = className;
  node.title = label;
  node.setAttribute("aria-label", label);
  node.appendChild(icon(iconName));
  node.addEventListener("click", () => onClick(node));
  return node;
}

export function copyButton(text) {
  return button("Copy", "copy", async (node) => {
    try {
      await navigator.clipboard.writeText(typeof text === "function" ? text() : text);
    } catch {
      return; // not allowed here
    }
    node.replaceChildren(icon("check"));
    setTimeout(() => node.replaceChildren(icon("copy")), 1200);
  });
}

function make(name, className, parent) {
  const node = document.createElement(name);
  node.className = className;
  parent?.appendChild(node);
  return node;
}

export class MessageView {
  /**
   * @param {object} message as the server has it
   * @param {object} actions {branch(message, step), branches(message) -> [at, of], edit, redo, fork, retry}
   */
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.node = make("article", `message ${message.role}`);
    this.node.setAttribute("aria-label", message.role === "user" ? "You" : "Answer");
    this.body = make("div", "body", this.node);
    this.foot = make("div", "foot", this.node);
    this.frame = 0;
    this.problem = null;
    this.paint();
    this.paintFoot();
  }

  get running() {
    return this.message.status === "running";
  }

  /** More text of a running answer, or all of it. */
  append(text, whole = false) {
    this.message.content = whole ? text : this.message.content + text;
    this.frame ||= requestAnimationFrame(() => this.paint());
  }

  update(fields) {
    Object.assign(this.message, fields);
    this.paint();
    this.paintFoot();
  }

  paint() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    const { role, content } = this.message;
    this.node.classList.toggle("streaming", this.running);
    this.node.setAttribute("aria-busy", String(this.running));
    if (role === "user" || (this.running && content.length > PLAIN_ABOVE)) this.body.textContent = content;
    else this.body.replaceChildren(render(content, copyButton));
    this.onPaint?.();
  }

  paintFoot() {
    this.foot.replaceChildren();
    const { role, id, status } = this.message;
    const [at, of] = this.actions.branches(this.message);
    this.foot.classList.toggle("branched", of > 1);
    if (of > 1 && !this.running) {
      const box = make("span", "branches", this.foot);
      box.append(
        button("Earlier version", "left", () => this.actions.branch(this.message, -1)),
        `${at}/${of}`,
        button("Later version", "right", () => this.actions.branch(this.message, 1)),
      );
      box.firstChild.disabled = at === 1;
      box.lastChild.disabled = at === of;
    }
    if (this.running || !id) return;
    this.foot.append(copyButton(() => this.message.content));
    if (role === "user") {
      this.foot.append(button("Edit and ask again", "edit", () => this.actions.edit(this.message)));
      return;
    }
    this.foot.append(button("Answer again", "redo", () => this.actions.redo(this.message)));
    this.foot.append(button("Go on from here in a new conversation", "fork", () => this.actions.fork(this.message)));
    this.stats(make("span", "stats", this.foot), status);
  }

  stats(box, status) {
    const said = [];
    const { usage, timing } = this.message;
    if (usage) {
      said.push(count(usage.completion_tokens, "token"));
      if (timing?.tokens_per_second) said.push(`${timing.tokens_per_second.toFixed(1)} tokens/s`);
      if (timing?.first_token_seconds != null) said.push(`first after ${seconds(timing.first_token_seconds)}`);
      const cached = usage.prompt_tokens_details?.cached_tokens || 0;
      said.push(`${cached}/${usage.prompt_tokens} cached`);
      box.title = `${cached} of ${count(usage.prompt_tokens, "prompt token")} were in the cache`;
    }
    const cut = this.message.finish_reason === "length" ? "cut at the limit" : "";
    const words = { cancelled: "stopped", interrupted: "interrupted", failed: "failed" }[status] || cut;
    if (words) {
      make("span", status === "failed" ? "mark" : "", box).textContent = words;
      if (said.length) box.append(" · ");
    }
    box.append(said.join(" · "));
  }

  /** Something to know under the message, with a way on. */
  note(text, label, go) {
    this.fail(text, label, go);
    this.problem.className = "problem note";
    this.problem.setAttribute("role", "note");
  }

  /** An error under the message, with a way on. `wait` is in seconds: until then the button counts down. */
  fail(text, label, retry, wait = 0) {
    this.clearProblem();
    const box = make("div", "problem", this.node);
    box.setAttribute("role", "alert");
    make("span", "", box).textContent = text;
    const again = make("button", "", box);
    again.type = "button";
    const until = Date.now() + Math.min(wait, 120) * 1000;
    const tick = () => {
      const left = Math.ceil((until - Date.now()) / 1000);
      again.disabled = left > 0;
      again.textContent = left > 0 ? `${label} in ${left} s` : label;
      if (left > 0 && box.isConnected) setTimeout(tick, 250);
    };
    this.problem = box;
    tick();
    again.addEventListener("click", () => {
      this.clearProblem();
      retry();
    });
  }

  clearProblem() {
    this.problem?.remove();
    this.problem = null;
  }
}

const count = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;
const seconds = (s) => (s < 10 ? `${s.toFixed(2)} s` : `${s.toFixed(1)} s`);
