// Server-sent events from a fetch response, whatever way the network cut the bytes.
//
// EventParser is fed chunks of bytes and gives back complete events. A chunk may end anywhere: inside a UTF-8
// character, inside "data:", between CR and LF. Grammar: https://html.spec.whatwg.org/multipage/server-sent-events.html

/** @typedef {{event: string, data: string, id: string}} ServerEvent */

export class EventParser {
  constructor() {
    this.decoder = new TextDecoder("utf-8");
    this.line = "";        // the line under way
    this.sawCR = false;    // the last character was CR: an LF after it is no new line
    this.lastId = "";
    this.reset();
  }

  reset() {
    this.event = "";
    this.data = null;
  }

  /**
   * @param {Uint8Array} bytes
   * @returns {ServerEvent[]} the events that these bytes completed
   */
  push(bytes) {
    return this.text(this.decoder.decode(bytes, { stream: true }));
  }

  /** The stream is over. An event without its blank line is incomplete and dropped, as the standard says. */
  end() {
    return this.text(this.decoder.decode());
  }

  text(text) {
    const events = [];
    let start = 0;
    for (let i = 0; i < text.length; i++) {
      const c = text.charCodeAt(i);
      if (c !== 10 && c !== 13) {
        this.sawCR = false;
        continue;
      }
      if (c === 10 && this.sawCR) {
        this.sawCR = false;
        start = i + 1;
        continue;
      }
      this.sawCR = c === 13;
      this.take(this.line + text.slice(start, i), events);
      this.line = "";
      start = i + 1;
    }
    this.line += text.slice(start);
    return events;
  }

  take(line, events) {
    if (line === "") {
      if (this.data !== null) {
        events.push({ event: this.event || "message", data: this.data, id: this.lastId });
      }
      this.reset();
      return;
    }
    const colon = line.indexOf(":");
    if (colon === 0) return; // a comment
    const field = colon < 0 ? line : line.slice(0, colon);
    let value = colon < 0 ? "" : line.slice(colon + 1);
    if (value.startsWith(" ")) value = value.slice(1);
    if (field === "data") this.data = this.data === null ? value : `${this.data}\n${value}`;
    else if (field === "event") this.event = value;
    else if (field === "id" && !value.includes("\0")) this.lastId = value;
  }
}

const SILENCE = 60_000; // ms; the server says something (a comment) every 15 s

/** A connection that is dead without knowing it (a sleeping laptop, another network) counts as broken. */
function soon(promise, ms) {
  let timer;
  const late = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new TypeError("the connection is silent")), ms);
  });
  return Promise.race([promise, late]).finally(() => clearTimeout(timer));
}

/**
 * The events of a response, as they come. Throws TypeError, as a broken connection does, after `silence` ms of silence.
 * @param {Response} response
 * @returns {AsyncGenerator<ServerEvent>}
 */
export async function* readEvents(response, silence = SILENCE) {
  const parser = new EventParser();
  const reader = response.body.getReader();
  try {
    for (;;) {
      const { done, value } = await soon(reader.read(), silence);
      yield* done ? parser.end() : parser.push(value);
      if (done) return;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
