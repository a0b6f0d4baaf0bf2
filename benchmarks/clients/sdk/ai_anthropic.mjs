// @ai-sdk/anthropic: messages.
import { createAnthropic } from "@ai-sdk/anthropic";
import { loop } from "./loop.mjs";
import { model, url } from "./tools.mjs";

await loop(createAnthropic({ baseURL: `${url}/v1`, apiKey: "local" })(model));
