// ollama (JavaScript): chat, streamed.
import { Ollama } from "ollama";
import { functions, run } from "./functions.mjs";
import { model, task, url } from "./tools.mjs";

const client = new Ollama({ host: url });
const tools = functions.map((f) => ({ type: "function", function: f }));
const messages = [{ role: "user", content: task }];
for (let turn = 0; turn < 8; turn++) {
  let [content, thinking, calls] = ["", "", []];
  for await (const { message } of await client.chat({ model, messages, tools, stream: true })) {
    content += message.content ?? "";
    thinking += message.thinking ?? "";
    calls.push(...(message.tool_calls ?? []));
  }
  messages.push({ role: "assistant", content, thinking, tool_calls: calls });
  if (!calls.length) { console.log(content); break; }
  for (const { function: f } of calls)
    messages.push({ role: "tool", tool_name: f.name, content: await run(f.name, f.arguments) });
}
