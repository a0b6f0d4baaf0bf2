// @ai-sdk/openai-compatible: chat completions.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { loop } from "./loop.mjs";
import { model, url } from "./tools.mjs";

await loop(createOpenAICompatible({ name: "localllm", baseURL: `${url}/v1`, apiKey: "local" })(model));
