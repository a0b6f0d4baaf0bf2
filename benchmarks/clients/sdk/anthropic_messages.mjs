// @anthropic-ai/sdk: messages, streamed.
import Anthropic from "@anthropic-ai/sdk";
import { functions, run } from "./functions.mjs";
import { model, task, url } from "./tools.mjs";

const client = new Anthropic({ baseURL: url, apiKey: "local", maxRetries: 0 });
const tools = functions.map(({ name, description, parameters }) => ({ name, description, input_schema: parameters }));
const messages = [{ role: "user", content: task }];
for (let turn = 0; turn < 8; turn++) {
  const answer = await client.messages.stream({ model, max_tokens: 32000, messages, tools }).finalMessage();
  messages.push({ role: "assistant", content: answer.content });
  const calls = answer.content.filter((block) => block.type === "tool_use");
  if (!calls.length) { console.log(answer.content.map((block) => block.text ?? "").join("")); break; }
  const content = [];
  for (const { id, name, input } of calls)
    content.push({ type: "tool_result", tool_use_id: id, content: await run(name, input) });
  messages.push({ role: "user", content });
}
