// Reads one answer to its end, through lost connections: what was seen is never asked for twice.

import { ApiError, ConnectionLost, readAnswer } from "./api.js";

const TRIES = 8;
const FIRST_WAIT = 300; // ms, doubled at each try, with some chance in it
const LONGEST_WAIT = 8000;

/** The turn is over, but how it went has to be looked up in the session. */
export class TurnGone extends Error {}

/** Why a message cannot be sent now, as a sentence; "" when it can. */
export function whyNotNow(turn) {
  if (!turn) return "";
  if (turn.lost) return "Not sent: the connection to the server is lost. Trying again…";
  return "Not sent: an answer is being written. Wait for its end, or stop it with Esc.";
}

export class TurnReader {
  /**
   * @param {Api} api
   * @param {string} sessionId
   * @param {(item: object) => void} onNews
   */
  constructor(api, sessionId, onNews) {
    this.api = api;
    this.sessionId = sessionId;
    this.onNews = onNews;
    this.abort = new AbortController();
    this.lastId = "";
    this.usage = null;
    this.lost = false;
    this.onLink = () => {}; // called with true when the connection is lost, with false when it is there again
  }

  link(lost) {
    if (lost === this.lost) return;
    this.lost = lost;
    this.onLink(lost);
  }

  /** @param {(signal: AbortSignal) => Promise<Response|null>} open starts or joins the turn */
  async run(open) {
    let response = await open(this.abort.signal);
    for (let tries = 0; ; ) {
      try {
        if (!response) throw new TurnGone();
        for await (const item of readAnswer(response)) {
          tries = 0;
          this.link(false);
          if (this.take(item)) return;
        }
      } catch (error) {
        if (error.name === "AbortError" || error instanceof TurnGone) throw error;
        const lost = error instanceof ConnectionLost || error instanceof TypeError; // TypeError: fetch's broken body
        if (!lost || ++tries > TRIES) throw lost ? new ConnectionLost() : error;
        this.link(true);
      }
      response = await this.rejoin(tries);
    }
  }

  async rejoin(tries) {
    for (;;) {
      await this.sleep(Math.min(LONGEST_WAIT, FIRST_WAIT * 2 ** tries) * (0.75 + Math.random() / 2));
      try {
        const response = await this.api.rejoin(this.sessionId, this.lastId, this.abort.signal);
        this.link(false);
        return response;
      } catch (error) {
        const again = error instanceof ApiError && (error.status === 0 || error.status >= 500);
        if (!again || ++tries > TRIES) throw error;
      }
    }
  }

  take(item) {
    if (item.id) this.lastId = item.id;
    this.usage = item.usage || this.usage;
    this.onNews(item);
    return item.done;
  }

  stop() {
    this.abort.abort();
  }

  sleep(ms) {
    return new Promise((resolve, reject) => {
      const gone = () => reject(new DOMException("left", "AbortError"));
      if (this.abort.signal.aborted) return gone();
      const timer = setTimeout(resolve, ms);
      this.abort.signal.addEventListener("abort", () => (clearTimeout(timer), gone()), { once: true });
    });
  }
}
