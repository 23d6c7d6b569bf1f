// Sampling settings, API key and appearance: kept in this browser.

const DEFAULTS = { temperature: "0.7", top_p: "0.95", repetition_penalty: "1.1", top_k: "", max_tokens: "", seed: "" };
const STORE = "chatsvc.settings";
const KEY = "chatsvc.key";
const THEME = "chatsvc.theme";

function load(name) {
  try {
    return localStorage.getItem(name);
  } catch {
    return null; // private mode
  }
}

function save(name, value) {
  try {
    if (value) localStorage.setItem(name, value);
    else localStorage.removeItem(name);
  } catch {
    // works without, until the page is closed
  }
}

export class Settings {
  constructor(dialog) {
    this.dialog = dialog;
    this.values = { ...DEFAULTS };
    try {
      Object.assign(this.values, JSON.parse(load(STORE) || "{}"));
    } catch {
      // somebody else's data
    }
    this.apiKey = load(KEY) || "";
    for (const name of Object.keys(DEFAULTS)) {
      const input = this.field(name);
      input.value = this.values[name];
      input.addEventListener("input", () => this.changed(name));
      this.show(name);
    }
    const key = this.field("key");
    key.value = this.apiKey;
    key.addEventListener("change", () => save(KEY, (this.apiKey = key.value.trim())));
    const theme = this.field("theme");
    theme.value = load(THEME) || "";
    theme.addEventListener("change", () => this.paint(theme.value));
    this.paint(theme.value);
    dialog.querySelector("#reset").addEventListener("click", () => this.reset());
    dialog.addEventListener("click", (event) => event.target === dialog && dialog.close()); // the backdrop
  }

  field(name) {
    return this.dialog.querySelector(`#${name}`);
  }

  changed(name) {
    this.values[name] = this.field(name).value;
    save(STORE, JSON.stringify(this.values));
    this.show(name);
  }

  show(name) {
    const output = this.dialog.querySelector(`output[for="${name}"]`);
    if (output) output.textContent = Number(this.values[name]).toFixed(2);
  }

  reset() {
    for (const [name, value] of Object.entries(DEFAULTS)) {
      this.field(name).value = value;
      this.changed(name);
    }
  }

  paint(theme) {
    save(THEME, theme);
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
  }

  /** The sampling fields of a request; what is empty is left to the server. */
  sampling() {
    const out = {};
    for (const [name, value] of Object.entries(this.values)) {
      const number = Number(value);
      if (value !== "" && Number.isFinite(number)) out[name] = number;
    }
    return out;
  }
}
