// The tools as schemas, for libraries that leave the loop to their user.
import { z } from "zod";
import { tools } from "./tools.mjs";

export const functions = Object.entries(tools).map(([name, { description, inputSchema }]) =>
  ({ name, description, parameters: z.toJSONSchema(inputSchema) }));
export const run = async (name, input) => String(await tools[name].execute(tools[name].inputSchema.parse(input)));
