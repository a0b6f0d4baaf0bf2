// Prints the JSON schemas of 50 zod models, as people write them: node zod_schemas.mjs > zod_schemas.json
// Needs the package zod (4) beside it.
import { z } from "zod";

const item = z.object({ name: z.string(), quantity: z.number().int(), price: z.number() });
const address = z.object({ street: z.string(), city: z.string(), zip: z.string().optional() });
const fields = {
  title: z.string(),
  summary: z.string().describe("in one sentence"),
  short: z.string().max(40),
  nickname: z.string().optional(),
  comment: z.string().nullable(),
  language: z.string().default("en"),
  count: z.number().int(),
  score: z.number().min(0).max(1),
  year: z.number().int().min(1900).max(2100),
  amount: z.number().positive(),
  rating: z.number().int().gte(1).lte(5).optional(),
  done: z.boolean(),
  verified: z.boolean().default(false),
  sentiment: z.enum(["positive", "negative", "neutral"]),
  status: z.enum(["open", "closed"]).nullable(),
  kind: z.literal("note"),
  mode: z.union([z.literal("fast"), z.literal("slow")]),
  tags: z.array(z.string()).max(3),
  numbers: z.array(z.number().int()).min(1).max(3),
  items: z.array(item).min(1).max(2),
  address,
  shipping: address.nullable(),
  position: z.tuple([z.number(), z.number()]),
  created: z.iso.datetime(),
  day: z.iso.date(),
  id: z.uuid(),
  email: z.email(),
  link: z.url(),
  metadata: z.record(z.string(), z.string()),
  value: z.union([z.string(), z.number()]),
  event: z.discriminatedUnion("type", [
    z.object({ type: z.literal("click"), x: z.number().int(), y: z.number().int() }),
    z.object({ type: z.literal("key"), code: z.string() }),
  ]),
  author: z.object({ name: z.string(), contact: z.object({ phone: z.string().optional() }) }),
};
const titles = ["Invoice", "Recipe", "Person", "Meeting", "Ticket", "Product", "Review", "Flight", "Song", "Event"];
const names = Object.keys(fields);
const node = z.object({ label: z.string(), get children() { return z.array(node).max(2); } });

let state = 1;
const below = (n) => { state = (state * 48271) % 2147483647; return state % n; };
const schemas = [];
for (let i = 0; i < 50; i++) {
  const shape = {};
  const wanted = 2 + below(4);
  while (Object.keys(shape).length < wanted) {
    const name = names[below(names.length)];
    shape[name] = fields[name];
  }
  if (i % 10 === 9) shape.root = node;
  // Zod closes an object that it prints as an output, and leaves it open as an input.
  const io = i % 2 ? "input" : "output";
  const model = i % 7 === 6 ? z.looseObject(shape) : z.object(shape);
  schemas.push(z.toJSONSchema(model.describe(titles[i % titles.length]), { io }));
}
console.log(JSON.stringify(schemas, null, 1));
