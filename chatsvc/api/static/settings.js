// Sampling settings, API key and appearance: kept in this browser. The key is never part of an address.

const DEFAULTS = { temperature: "0.7", top_p: "0.95", repetition_penalty: "1.1", top_k: "", max_tokens: "", seed: "" };
const STORE = "chatsvc.settings";
const KEY = "chatsvc.key";
const THEME = "chatsvc.theme";

const local = () => localStorage; // reading the property itself may throw
const tab = () => sessionStorage;

function load(name, where = local) {
  try {
    return where().getItem(name);
  } catch {
    return null; // private mode
  }
}

function save(name, value, where = local) {
  try {
    if (value) where().setItem(name, value);
    else where().removeItem(name);
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
    this.remember = Boolean(load(KEY));
    this.apiKey = load(KEY) || load(KEY, tab) || "";
    for (const name of Object.keys(DEFAULTS)) {
      const input = this.field(name);
      input.value = this.values[name];
      input.addEventListener("input", () => this.changed(name));
      this.show(name);
    }
    const key = this.field("key");
    key.value = this.apiKey;
    key.addEventListener("change", () => this.setKey(key.value.trim(), this.remember));
    if (this.apiKey) this.showKey();
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

  /** The key from now on, "" for none: for this tab, or to be remembered by the browser. */
  setKey(key, remember) {
    this.apiKey = key;
    this.remember = remember;
    save(KEY, remember ? key : "");
    save(KEY, remember ? "" : key, tab);
    this.field("key").value = key;
  }

  /** The server wants keys: show where it can be changed. */
  showKey() {
    this.field("key-part").hidden = false;
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
