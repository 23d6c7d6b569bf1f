// Run by test_page.py: node page_test.mjs <folder of the page's files>. Throws at the first thing that is wrong.

import assert from "node:assert/strict";
import { pathToFileURL } from "node:url";
import { join } from "node:path";

const load = (name) => import(pathToFileURL(join(process.argv[2], name)).href);
const bytes = (text) => new TextEncoder().encode(text);
const { EventParser, readEvents } = await load("sse.js");
const { Api, ApiError, ConnectionLost, readAnswer } = await load("api.js");
const { TurnReader, TurnGone, whyNotNow } = await load("turn.js");
const { Door } = await load("door.js");
const tree = await load("tree.js");

// -- the parser: the same events for every cut ---------------------------------------------------------------------

const STREAM = [
  ": ping\n\n",
  "id: msg_1:0:1\ndata: {\"a\":\"naïve 漢字 👩‍👩‍👧\"}\n\n",
  "event: error\r\ndata: one\r\ndata: two\r\n\r\n",
  "data:no space\r\rid\rdata: after an empty id\n\n",
  "nonsense: x\ndata\n\n",
  ":\n\nid: a\0b\ndata: [DONE]\n\n",
  "data: cut off",
].join("");
const EXPECTED = [
  { event: "message", data: "{\"a\":\"naïve 漢字 👩‍👩‍👧\"}", id: "msg_1:0:1" },
  { event: "error", data: "one\ntwo", id: "msg_1:0:1" },
  { event: "message", data: "no space", id: "msg_1:0:1" },
  { event: "message", data: "after an empty id", id: "" },
  { event: "message", data: "", id: "" },
  { event: "message", data: "[DONE]", id: "" },
];
const all = bytes(STREAM);
const parse = (cuts) => {
  const parser = new EventParser();
  const out = [];
  let from = 0;
  for (const to of [...cuts, all.length]) {
    out.push(...parser.push(all.subarray(from, to)));
    from = to;
  }
  return [...out, ...parser.end()];
};
assert.deepEqual(parse([]), EXPECTED);
for (let i = 0; i <= all.length; i++) assert.deepEqual(parse([i]), EXPECTED, `cut at ${i}`);
assert.deepEqual(parse([...all.keys()]), EXPECTED, "byte by byte");
for (let i = 0; i < all.length; i++) for (let j = i; j < all.length; j += 7) assert.deepEqual(parse([i, j]), EXPECTED);

// -- answers -------------------------------------------------------------------------------------------------------

const chunk = (id, content, finish = null) =>
  `id: ${id}\ndata: ${JSON.stringify({ choices: [{ index: 0, delta: { content }, finish_reason: finish }], usage: null })}\n\n`;
const USAGE = { prompt_tokens: 3, completion_tokens: 4, prompt_tokens_details: { cached_tokens: 0 } };
const END = `data: ${JSON.stringify({ choices: [], usage: USAGE })}\n\ndata: [DONE]\n\n`;
const stream = (...parts) =>
  new Response(
    new ReadableStream({
      pull(controller) { // one part at a time: an error must not swallow what came before it
        const part = parts.shift();
        if (part === undefined) controller.close();
        else if (part instanceof Error) controller.error(part);
        else controller.enqueue(bytes(part));
      },
    }),
  );
const collect = async (response) => {
  const out = [];
  for await (const item of readAnswer(response)) out.push(item);
  return out;
};

const good = await collect(stream(chunk("t:0:1", "Hel"), chunk("t:0:2", "lo", "stop"), END));
assert.equal(good.map((i) => i.text).join(""), "Hello");
assert.deepEqual([good[1].finish, good[2].usage, good[3].done], ["stop", USAGE, true]);
await assert.rejects(collect(stream(chunk("t:0:1", "Hel"))), ConnectionLost);
const broken = stream(chunk("t:0:1", "x"), 'event: error\ndata: {"error":{"message":"engine fell over"}}\n\n');
await assert.rejects(collect(broken), (e) => e instanceof ApiError && /fell over/.test(e.message));
const snapshot = await collect(stream(`event: snapshot\n${chunk("t:0:9", "all of it")}`, chunk("t:0:10", "!", "stop"), END));
assert.deepEqual(snapshot.map((i) => i.whole), [true, false, false, undefined]);
const moved = stream(chunk("t:0:1", "x"), 'event: error\ndata: {"error":{"message":"stops","code":"rejoin"}}\n\n');
await assert.rejects(collect(moved), ConnectionLost);
let count = 0;
for await (const _ of readEvents(stream("data: 1\n\n", "data: 2\n\n"))) if (++count) break; // leaving closes the stream
assert.equal(count, 1);

// -- HTTP errors ---------------------------------------------------------------------------------------------------

const api = new Api(() => "the-key");
let calls = [];
const answers = [];
globalThis.fetch = async (path, options) => {
  calls.push([options?.method || "GET", path, options?.headers || {}]);
  const next = answers.shift();
  if (next instanceof Error) throw next;
  return next;
};
const json = (status, body, headers = {}) => new Response(JSON.stringify(body), { status, headers });
answers.push(json(429, { error: { message: "the queue is full" } }, { "Retry-After": "7" }));
await assert.rejects(api.send("s", {}), (e) => e.status === 429 && e.retryAfter === 7 && e.message === "the queue is full");
assert.equal(calls[0][2].Authorization, "Bearer the-key");
answers.push(json(409, { error: { message: "running", turn_id: "msg_9" } }));
await assert.rejects(api.send("s", {}), (e) => e.turnId === "msg_9");
answers.push(new Response("<html>bad gateway</html>", { status: 502 }));
await assert.rejects(api.session("s"), (e) => e.status === 502 && /502/.test(e.message));
answers.push(new TypeError("failed to fetch"));
await assert.rejects(api.session("s"), (e) => e instanceof ApiError && e.status === 0);
calls = [];
answers.push(json(200, {}));
await api.session("../x?y#z");
assert.equal(calls[0][1], "/v1/sessions/..%2Fx%3Fy%23z"); // an id is data, not a path

// -- the key: asked for when the server wants one, and once -------------------------------------------------------

const door = (key = "") => {
  const fields = { "#door-wrong": {}, "#door-key": {}, "#door-remember": { checked: false } };
  const dialog = new EventTarget();
  dialog.shown = 0;
  dialog.querySelector = (name) => fields[name];
  dialog.showModal = () => dialog.shown++;
  dialog.answer = (key, value = "yes") => {
    fields["#door-key"].value = key;
    dialog.returnValue = value;
    dialog.dispatchEvent(new Event("close"));
  };
  const settings = { apiKey: key, setKey: (k, remember) => Object.assign(settings, { apiKey: k, remember }), showKey: () => (settings.seen = true) };
  const asker = new Door(dialog, settings);
  return { dialog, settings, fields, asker, api: new Api(() => settings.apiKey, (refused) => asker.ask(refused)) };
};
const tick = () => new Promise((resolve) => setTimeout(resolve));
const refused = () => json(401, { error: { message: "An API key is needed" } });
{
  const { dialog, settings, fields, api } = door();
  calls = [];
  answers.push(refused(), refused(), refused(), json(200, { a: 1 }), json(200, { a: 2 }), json(200, { a: 3 }));
  const all = Promise.all([api.models(), api.sessions(), api.session("s")]);
  await tick();
  assert.deepEqual([dialog.shown, settings.seen, fields["#door-wrong"].hidden], [1, true, true]); // three refusals, one question
  assert.ok(calls.every((c) => !("Authorization" in c[2])));
  dialog.answer(" sk-good ");
  assert.deepEqual((await all).map((x) => x.a), [1, 2, 3]);
  assert.deepEqual(calls.slice(3).map((c) => c[2].Authorization), Array(3).fill("Bearer sk-good"));
  assert.ok(calls.every((c) => !c[1].includes("sk-good"))); // never in an address
  assert.deepEqual([settings.apiKey, settings.remember, fields["#door-key"].value], ["sk-good", false, ""]);
}
{
  const { dialog, fields, settings, api } = door("sk-old"); // a wrong key, then another wrong one, then none
  fields["#door-remember"].checked = true;
  answers.push(refused(), refused());
  const one = api.models();
  await tick();
  assert.equal(fields["#door-wrong"].hidden, false);
  dialog.answer("sk-new");
  await tick();
  assert.deepEqual([dialog.shown, settings.apiKey, settings.remember], [2, "sk-new", true]);
  dialog.answer("", "");
  await assert.rejects(one, (e) => e.status === 401 && /settings/.test(e.message));
  answers.push(refused());
  await assert.rejects(api.models(), (e) => e.status === 401); // and is not asked again at every turn
  assert.equal(dialog.shown, 2);
  settings.apiKey = "sk-right"; // given in the settings
  answers.push(json(200, {}));
  await api.models();
}
{
  const { dialog, api } = door("sk");
  answers.push(json(403, { error: { message: "may not" } })); // a good key, but not for this: no question
  await assert.rejects(api.models(), (e) => e.status === 403);
  assert.equal(dialog.shown, 0);
}

// -- a turn through lost connections ---------------------------------------------------------------------------------

const turn = () => {
  const seen = [];
  const reader = new TurnReader(api, "s", (item) => seen.push(item.text));
  reader.sleep = async () => {};
  return [reader, seen];
};
{
  const [reader, seen] = turn();
  calls = [];
  answers.push(new TypeError("still offline"), json(503, { error: { message: "later" } }));
  answers.push(stream(chunk("t:0:3", "cd"), new TypeError("network changed")));
  answers.push(stream(chunk("t:0:4", "e", "stop"), END));
  await reader.run(async () => stream(chunk("t:0:2", "ab"))); // ends without [DONE]
  assert.equal(seen.join(""), "abcde");
  assert.deepEqual(calls.map((c) => c[2]["Last-Event-ID"]), ["t:0:2", "t:0:2", "t:0:2", "t:0:3"]);
  assert.equal(reader.usage.completion_tokens, 4);
}
{
  const [reader, seen] = turn(); // what is said about it: at once, not after the waiting; and again when it is back
  const said = [];
  reader.onLink = (lost) => said.push(lost ? "lost" : "back");
  reader.sleep = async () => void said.push("waits");
  answers.push(new TypeError("offline"), stream(chunk("t:0:2", "b", "stop"), END));
  await reader.run(async () => stream(chunk("t:0:1", "a"), new TypeError("killed")));
  assert.deepEqual([said, seen.join("")], [["lost", "waits", "waits", "back"], "ab"]);
}
{
  assert.equal(whyNotNow(null), "");
  const [reader] = turn();
  assert.match(whyNotNow(reader), /being written/);
  reader.link(true);
  assert.match(whyNotNow(reader), /connection .* lost/);
}
{
  const silent = new Response(new ReadableStream({ start: (c) => c.enqueue(bytes(": ping\n\n")) })); // and then nothing
  await assert.rejects(readEvents(silent, 20).next(), TypeError);
}
{
  const [reader] = turn();
  answers.push(new Response(null, { status: 204 }));
  await assert.rejects(reader.run(async () => stream(chunk("t:0:2", "ab"))), TurnGone);
}
{
  const [reader] = turn(); // the server stays away: an error in the end, no endless waiting
  answers.push(...Array.from({ length: 20 }, () => new TypeError("offline")));
  await assert.rejects(reader.run(async () => stream(chunk("t:0:2", "ab"))), ApiError);
  answers.length = 0;
}
{
  const [reader] = turn(); // an error event is final
  await assert.rejects(reader.run(async () => stream('data: {"error":{"message":"no"}}\n\n')), /no/);
}
{
  const reader = new TurnReader(api, "s", () => {});
  reader.stop();
  await assert.rejects(reader.sleep(10_000), { name: "AbortError" });
}

// -- the tree ------------------------------------------------------------------------------------------------------

const m = (id, parent_id, role) => ({ id, parent_id, role });
const messages = [m("u1", null, "user"), m("a1", "u1", "assistant"), m("u2", "a1", "user"), m("a2", "u2", "assistant"),
  m("u3", "a1", "user"), m("a3", "u3", "assistant"), m("a2b", "u2", "assistant")];
const ids = (path) => path.map((x) => x.id).join(" ");
assert.equal(ids(tree.pathTo(messages, tree.lastLeaf(messages))), "u1 a1 u2 a2b");
assert.equal(tree.lastLeaf([]), null);
assert.equal(ids(tree.pathTo(messages, null)), "");
assert.equal(ids(tree.siblings(messages, messages[2])), "u2 u3");
assert.equal(tree.newestLeaf(messages, "u3"), "a3");
assert.equal(tree.newestLeaf(messages, "u2"), "a2b");
assert.equal(ids(tree.pathTo([m("x", "y", "user"), m("y", "x", "user")], "x")), "y x"); // a circle ends

// -- what the model says is text -------------------------------------------------------------------------------------

class Node {
  constructor(name) {
    this.name = name;
    this.children = [];
    this.attributes = {};
  }
  appendChild(child) {
    this.children.push(child);
    return child;
  }
  set textContent(text) {
    this.children = [{ name: "#text", text: String(text), children: [], attributes: {} }];
  }
  setAttribute(name, value) {
    this.attributes[name] = value;
  }
  set className(value) {
    this.attributes.class = value;
  }
  set start(value) {
    this.attributes.start = value;
  }
}
globalThis.document = {
  createElement: (name) => new Node(name),
  createDocumentFragment: () => new Node("#fragment"),
  createTextNode: (text) => ({ name: "#text", text, children: [], attributes: {} }),
};
const { render } = await load("markdown.js");
const walk = (node, visit) => (visit(node), node.children.forEach((c) => walk(c, visit)));
const shown = (text) => {
  const names = new Set();
  let said = "";
  walk(render(text), (node) => {
    names.add(node.name);
    if (node.name === "#text") said += node.text;
    for (const [key, value] of Object.entries(node.attributes)) assert.ok(["class", "start"].includes(key) && !/[<(]/.test(value));
  });
  return [names, said];
};
const ALLOWED = new Set(["#fragment", "#text", "p", "strong", "em", "code", "pre", "div", "span", "ul", "ol", "li", "blockquote", "hr", "h3", "h4", "h5", "h6"]);
const ATTACKS = [
  "<img src=x onerror=alert(1)>", "<svg onload=alert(1)>", "[x](javascript:alert(1))", "<iframe srcdoc='<script>1</script>'>",
  "![x](http://127.0.0.1/x)", "```<script>\nalert(1)\n```", "**<b onclick=x>**", "`<script>`", "# <script>x</script>", "- <img src=x>",
  "> <style>*{}</style>", "<a href='javascript:1'>x</a>", "1. <script>", "```\" onclick=\"x\ncode\n```",
];
for (const attack of ATTACKS) {
  for (let cut = 1; cut <= attack.length; cut++) { // while it streams
    const [names] = shown(attack.slice(0, cut));
    for (const name of names) assert.ok(ALLOWED.has(name), `${name} from ${attack}`);
  }
  assert.ok(shown(attack)[1].includes(attack.match(/<[^>]*>?|javascript|http|onclick/)[0]), attack); // shown, not swallowed
}
const [names, said] = shown("# T\n\nA **b** *c* `d`\n\n- one\n- two\n  - deep\n\n3. x\n4. y\n\n> q\n\n---\n\n```py\na < b\n```\nend");
for (const name of ["h3", "strong", "em", "code", "ul", "ol", "li", "blockquote", "hr", "pre"]) assert.ok(names.has(name), name);
for (const word of ["T", "A ", "one", "deep", "a < b", "end"]) assert.ok(said.includes(word), word);
for (const text of ["2 * 3 * 4", "snake_case_name", "* ", "**", "```", "`", "-", "a\n".repeat(2000), "*".repeat(3000), "> ".repeat(500), "- ".repeat(500)]) {
  const [, back] = shown(text);
  assert.ok(back.replace(/\s/g, "").length <= text.length + 4);
}
assert.equal(shown("2 * 3 * 4")[1], "2 * 3 * 4");
console.log("page: OK");
