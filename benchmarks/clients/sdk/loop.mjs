// The AI SDK's own loop, streamed.
import { stepCountIs, streamText } from "ai";
import { task, tools } from "./tools.mjs";

export async function loop(model) {
  const answer = streamText({ model, tools, prompt: task, stopWhen: stepCountIs(8), maxRetries: 0,
    onError: ({ error }) => { console.error(error); process.exitCode = 1; } });
  let said = "";
  for await (const text of answer.textStream) said += text;
  console.log(said);
}
