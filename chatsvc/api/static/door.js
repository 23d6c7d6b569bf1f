// Asks for the API key once the server has said that it wants one; without that nobody sees a field for it.

export class Door {
  /**
   * @param {HTMLDialogElement} dialog
   * @param {{apiKey: string, setKey: (key: string, remember: boolean) => void, showKey: () => void}} settings
   */
  constructor(dialog, settings) {
    this.dialog = dialog;
    this.settings = settings;
    this.asking = null;
    this.declined = null; // the key (or "") that a person did not want to replace
  }

  /**
   * The server has refused this key ("" for none). True when there is another one to try; several requests that are
   * refused at once lead to one question.
   */
  async ask(refused) {
    if (this.settings.apiKey !== refused) return true; // it was given meanwhile
    if (this.declined === refused) return false;
    this.asking ||= this.question(refused).finally(() => (this.asking = null));
    return this.asking;
  }

  question(refused) {
    const field = (name) => this.dialog.querySelector(`#${name}`);
    this.settings.showKey();
    field("door-wrong").hidden = !refused;
    field("door-key").value = "";
    this.dialog.returnValue = "";
    const answered = new Promise((resolve) => this.dialog.addEventListener("close", resolve, { once: true }));
    this.dialog.showModal();
    return answered.then(() => {
      const key = this.dialog.returnValue === "yes" ? field("door-key").value.trim() : "";
      field("door-key").value = "";
      if (!key || key === refused) {
        this.declined = refused;
        return false;
      }
      this.settings.setKey(key, field("door-remember").checked);
      return true;
    });
  }
}
