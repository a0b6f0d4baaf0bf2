// The AI SDK's every way of asking, over each dialect it speaks: a line of JSON says what each came to.
// tests/server/test_ai_sdk.py reads them.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false;
const { LOCALLLM_URL: url, LOCALLLM_MODEL: name } = process.env;
const server = { baseURL: `${url}/v1`, apiKey: "local" };
const models = {
  "openai chat": createOpenAI(server).chat(name),
  "openai responses": createOpenAI(server).responses(name),
  "openai-compatible": createOpenAICompatible({
    ...server, name: "localllm", supportsStructuredOutputs: true, includeUsage: true })(name),
  anthropic: createAnthropic(server)(name),
};
const common = {
  maxRetries: 0, maxOutputTokens: 2000, stopWhen: stepCountIs(4),
  providerOptions: {
    openai: { reasoningSummary: "auto", forceReasoning: true },
    anthropic: { thinking: { type: "enabled", budgetTokens: 1024 } },
  },
};
const look = tool({ description: "Look.", inputSchema: z.object({ q: z.string() }),
  execute: async ({ q }) => `seen ${q}` });
const bird = Output.object({ schema: z.object({ name: z.string(), weight_mg: z.number().int() }) });

async function streamed(asked, onText = () => {}) {
  const answer = streamText({ ...asked, onError: () => {} });
  for await (const part of answer.fullStream) {
    if (part.type === "error") throw part.error;
    if (part.type === "text-delta") onText();
    if (part.type === "abort") return { aborted: true };
  }
  return answer;
}

async function told(answer) {
  const [text, reasoning, reason, usage, steps] = await Promise.all([
    answer.text, answer.reasoningText, answer.finishReason, answer.usage, answer.steps]);
  const seen = steps.flatMap((step) => step.toolResults.map((result) => result.output));
  return { text, reasoning, reason, output_tokens: usage.outputTokens, seen };
}

const hi = { prompt: "hi" }, tools = { tools: { look }, prompt: "go" };
const form = { output: bird, prompt: "form" };
const ways = {
  whole: async (model) => told(await generateText({ ...common, ...hi, model })),
  stream: async (model) => told(await streamed({ ...common, ...hi, model })),
  "whole tools": async (model) => told(await generateText({ ...common, ...tools, model })),
  "streamed tools": async (model) => told(await streamed({ ...common, ...tools, model })),
  "whole form": async (model) => (await generateText({ ...common, ...form, model })).output,
  "streamed form": async (model) => (await streamed({ ...common, ...form, model })).output,
  abort: async (model) => {
    const leaving = new AbortController();
    const asked = { ...common, model, prompt: "endless", abortSignal: leaving.signal };
    return streamed(asked, () => leaving.abort());
  },
  overflow: async (model) => {
    const asked = { ...common, model, prompt: "word ".repeat(2000) };
    return generateText(asked).catch((error) => ({ status: error.statusCode, said: error.message }));
  },
};
for (const [dialect, model] of Object.entries(models)) {
  for (const [way, ask] of Object.entries(ways)) {
    const got = await ask(model).catch((error) => ({ error: `${error.name}: ${error.message}` }));
    console.log(JSON.stringify({ dialect, way, got }));
  }
}
