// @ai-sdk/openai: chat completions.
import { createOpenAI } from "@ai-sdk/openai";
import { loop } from "./loop.mjs";
import { model, url } from "./tools.mjs";

await loop(createOpenAI({ baseURL: `${url}/v1`, apiKey: "local" }).chat(model));
