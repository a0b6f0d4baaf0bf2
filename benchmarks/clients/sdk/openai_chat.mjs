// openai (JavaScript): chat completions, streamed.
import OpenAI from "openai";
import { functions, run } from "./functions.mjs";
import { model, task, url } from "./tools.mjs";

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "local", maxRetries: 0 });
const messages = [{ role: "user", content: task }];
for (let turn = 0; turn < 8; turn++) {
  const tools = functions.map((f) => ({ type: "function", function: f }));
  const answer = (await client.chat.completions.stream({ model, messages, tools }).finalChatCompletion()).choices[0].message;
  messages.push(answer);
  if (!answer.tool_calls?.length) { console.log(answer.content); break; }
  for (const { id, function: f } of answer.tool_calls)
    messages.push({ role: "tool", tool_call_id: id, content: await run(f.name, JSON.parse(f.arguments)) });
}
