// openai (JavaScript): responses, streamed.
import OpenAI from "openai";
import { functions, run } from "./functions.mjs";
import { model, task, url } from "./tools.mjs";

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "local", maxRetries: 0 });
const tools = functions.map((f) => ({ type: "function", strict: false, ...f }));
let input = [{ role: "user", content: task }];
let previous_response_id;
for (let turn = 0; turn < 8; turn++) {
  const answer = await client.responses.stream({ model, input, tools, previous_response_id }).finalResponse();
  const calls = answer.output.filter((item) => item.type === "function_call");
  if (!calls.length) { console.log(answer.output_text); break; }
  previous_response_id = answer.id;
  input = [];
  for (const { call_id, name, arguments: sent } of calls)
    input.push({ type: "function_call_output", call_id, output: await run(name, JSON.parse(sent)) });
}
