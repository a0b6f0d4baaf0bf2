// @ai-sdk/openai: the responses API.
import { createOpenAI } from "@ai-sdk/openai";
import { loop } from "./loop.mjs";
import { model, url } from "./tools.mjs";

await loop(createOpenAI({ baseURL: `${url}/v1`, apiKey: "local" })(model));
