// The running server, as the environment names it, and what it says about clients that left.
import assert from "node:assert/strict";

export const url = process.env.CHATSVC_TEST_URL;
export const model = process.env.CHATSVC_TEST_MODEL;
export const ask = "Name a colour.";

export async function aborted() {
  const text = await (await fetch(`${url}/metrics`)).text();
  const found = text.match(/^chatsvc_requests_finished_total\{reason="abort"\} (\S+)$/m);
  return found ? Number(found[1]) : 0;
}

// A client has left: its request ends, long before its text would.
export async function expectAbort(before) {
  const end = Date.now() + 20_000;
  while ((await aborted()) <= before) {
    assert(Date.now() < end, "the request of a client that left goes on");
    await new Promise((done) => setTimeout(done, 50));
  }
}
