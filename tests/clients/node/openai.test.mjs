import assert from "node:assert/strict";
import test from "node:test";
import OpenAI from "openai";
import { aborted, ask, expectAbort, model, url } from "./setup.mjs";

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "-", maxRetries: 0 });
const messages = [{ role: "user", content: ask }];
const short = { model, messages, max_tokens: 8, temperature: 0 };

test("chat, stream, usage", async () => {
  const answer = await client.chat.completions.create(short);
  const said = answer.choices[0].message.content;
  assert(said && answer.usage.completion_tokens <= 8);
  let text = "";
  let usage;
  for await (const chunk of await client.chat.completions.create({
    ...short,
    stream: true,
    stream_options: { include_usage: true },
  })) {
    text += chunk.choices[0]?.delta.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(text, said);
  assert.equal(usage.completion_tokens, answer.usage.completion_tokens);
});

test("abort", async () => {
  const before = await aborted();
  const stream = await client.chat.completions.create({ ...short, max_tokens: 4000, ignore_eos: true, stream: true });
  for await (const chunk of stream) {
    assert(chunk.choices);
    break; // the SDK aborts its request
  }
  await expectAbort(before);
});

test("errors", async () => {
  await assert.rejects(client.chat.completions.create({ ...short, model: "other" }), OpenAI.NotFoundError);
  await assert.rejects(client.chat.completions.create({ ...short, temperature: 9 }), (error) => {
    assert(error instanceof OpenAI.BadRequestError);
    return error.param === "temperature";
  });
});

test("responses", async () => {
  const first = await client.responses.create({ model, input: ask, max_output_tokens: 8, temperature: 0 });
  assert(first.output_text);
  const stored = await client.responses.retrieve(first.id);
  assert.deepEqual(stored.output, first.output);
  let text = "";
  const next = { model, input: "And another?", previous_response_id: first.id, max_output_tokens: 8, stream: true };
  for await (const event of await client.responses.create(next)) {
    if (event.type === "response.output_text.delta") text += event.delta;
  }
  assert(text);
});
