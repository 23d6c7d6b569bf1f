// The server's routes, as the page uses them.

import { readEvents } from "./sse.js";

/** An answer that was no success. `retryAfter` is in seconds, or 0. */
export class ApiError extends Error {
  constructor(message, status = 0, details = {}) {
    super(message);
    this.status = status;
    this.retryAfter = details.retryAfter || 0;
    this.turnId = details.turnId || null;
  }
}

export class Api {
  /**
   * @param {() => string} key the API key, "" without one
   * @param {(refused: string) => Promise<boolean>} ask called when the server refuses that key; true: try once more
   */
  constructor(key, ask = async () => false) {
    this.key = key;
    this.ask = ask;
  }

  async request(method, path, options = {}) {
    for (;;) {
      const key = this.key();
      const response = await this.fetch(key, method, path, options);
      if (response.ok) return response;
      if (response.status !== 401 || !(await this.ask(key))) throw await failure(response);
    }
  }

  async fetch(key, method, path, { body, signal, headers = {} }) {
    try {
      return await fetch(path, {
        method,
        signal,
        cache: "no-store",
        headers: {
          ...headers,
          ...(key ? { Authorization: `Bearer ${key}` } : {}),
          ...(body === undefined ? {} : { "Content-Type": "application/json" }),
        },
        body: body === undefined ? undefined : JSON.stringify(body),
      });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("The server cannot be reached.");
    }
  }

  async json(method, path, options) {
    return (await this.request(method, path, options)).json();
  }

  sessions = () => this.json("GET", "/v1/sessions?kind=chat&limit=100");
  models = () => this.json("GET", "/v1/models");
  create = (fields) => this.json("POST", "/v1/sessions", { body: fields });
  session = (id) => this.json("GET", one(id));
  patch = (id, fields) => this.json("PATCH", one(id), { body: fields });
  remove = (id) => this.json("DELETE", one(id));
  cancel = (id) => this.json("POST", `${one(id)}/cancel`);

  async ready() {
    try {
      return (await fetch("/ready", { cache: "no-store" })).ok;
    } catch {
      return null;
    }
  }

  send = (id, body, signal) => this.request("POST", `${one(id)}/messages`, { body, signal });

  regenerate = (id, messageId, body, signal) =>
    this.request("POST", `${one(id)}/messages/${encodeURIComponent(messageId)}/regenerate`, { body, signal });

  /** Rejoins the running turn; null when nothing runs. */
  async rejoin(id, lastId, signal) {
    const headers = lastId ? { "Last-Event-ID": lastId } : {};
    const response = await this.request("GET", `${one(id)}/stream`, { signal, headers });
    return response.status === 204 ? null : response;
  }
}

const one = (id) => `/v1/sessions/${encodeURIComponent(id)}`;

async function failure(response) {
  let error = {};
  try {
    error = (await response.json()).error || {};
  } catch {
    // not ours: a proxy's page, say
  }
  const retryAfter = Number.parseInt(response.headers.get("Retry-After") || "0", 10) || 0;
  const wanted = response.status === 401 && "This server wants an API key: enter it in the settings.";
  const message = wanted || error.message || `The server answered ${response.status}.`;
  return new ApiError(message, response.status, { retryAfter, turnId: error.turn_id });
}

/**
 * What an answer's stream says: {id, text, whole, finish, usage, done}. `whole`: the text takes the place of all before
 * it. Ends after [DONE]; an end without it is an error.
 * @param {Response} response
 */
export async function* readAnswer(response) {
  for await (const { event, data, id } of readEvents(response)) {
    if (data === "[DONE]") {
      yield { id, text: "", done: true };
      return;
    }
    let chunk;
    try {
      chunk = JSON.parse(data);
    } catch {
      continue; // not meant for us
    }
    if (chunk.error?.code === "rejoin") throw new ConnectionLost(); // this server stops, the answer goes on elsewhere
    if (event === "error" || chunk.error) throw new ApiError(chunk.error?.message || "The answer failed.", 500);
    const choice = chunk.choices?.[0];
    yield {
      id,
      text: choice?.delta?.content || "",
      whole: event === "snapshot",
      finish: choice?.finish_reason || null,
      usage: chunk.usage || null,
      done: false,
    };
  }
  throw new ConnectionLost();
}

/** The stream ended in the middle: the answer may still be running. */
export class ConnectionLost extends ApiError {
  constructor() {
    super("The connection was lost.");
  }
}
