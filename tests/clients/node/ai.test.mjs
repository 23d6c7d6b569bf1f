import assert from "node:assert/strict";
import test from "node:test";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, streamText, tool } from "ai";
import { z } from "zod";
import { aborted, ask, expectAbort, model, url } from "./setup.mjs";

const here = createOpenAICompatible({ name: "chatsvc", baseURL: `${url}/v1`, apiKey: "-", includeUsage: true });
const short = { model: here(model), prompt: ask, maxOutputTokens: 8, temperature: 0, maxRetries: 0 };

test("chat, stream, usage", async () => {
  const answer = await generateText(short);
  assert(answer.text && answer.usage.outputTokens <= 8);
  const streamed = streamText(short);
  let text = "";
  for await (const piece of streamed.textStream) text += piece;
  assert.equal(text, answer.text);
  assert.equal((await streamed.usage).outputTokens, answer.usage.outputTokens);
});

test("abort", async () => {
  const before = await aborted();
  const stop = new AbortController();
  const streamed = streamText({
    ...short,
    maxOutputTokens: 4000,
    providerOptions: { chatsvc: { ignore_eos: true } },
    abortSignal: stop.signal,
  });
  for await (const piece of streamed.textStream) if (piece) stop.abort();
  await expectAbort(before);
});

test("errors", async () => {
  await assert.rejects(generateText({ ...short, model: here("other") }), (error) => {
    assert(APICallError.isInstance(error));
    return error.statusCode === 404 && error.message.includes(model);
  });
});

test("tools", async () => {
  const tools = { weather: tool({ description: "d", inputSchema: z.object({}).passthrough() }) };
  const toolChoice = { type: "tool", toolName: "weather" };
  const answer = await generateText({ ...short, maxOutputTokens: 200, tools, toolChoice });
  for (const call of answer.toolCalls) assert.equal(call.toolName, "weather");
});
