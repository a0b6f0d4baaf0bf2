// The three tools that every JavaScript library here gets, and where the server is.
import { execSync } from "node:child_process";
import { readFileSync, writeFileSync } from "node:fs";
import { tool } from "ai";
import { z } from "zod";

export const { LOCALLLM_URL: url, LOCALLLM_MODEL: model, LOCALLLM_TASK: task } = process.env;

export const tools = {
  read_file: tool({
    description: "Read a file.",
    inputSchema: z.object({ path: z.string(), limit: z.number().int().min(1).nullish() }),
    execute: async ({ path }) => readFileSync(path, "utf8"),
  }),
  edit_file: tool({
    description: "Replace a text in a file.",
    inputSchema: z.object({ path: z.string(), old_string: z.string(), new_string: z.string() }),
    execute: async ({ path, old_string, new_string }) => {
      writeFileSync(path, readFileSync(path, "utf8").replaceAll(old_string, new_string));
      return "Edited.";
    },
  }),
  run_command: tool({
    description: "Run a command.",
    inputSchema: z.object({ command: z.string(), timeout_ms: z.number().int().min(1).max(600000) }),
    execute: async ({ command, timeout_ms }) => {
      if (timeout_ms !== 120000) throw new Error(`the number came as ${timeout_ms}`);
      return execSync(command, { encoding: "utf8" });
    },
  }),
};
