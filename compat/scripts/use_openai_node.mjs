// openai-node: chat, completions and Responses, streamed, parsed, with tools, and what it returns handed back.
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { at, check, main, must } from "./checks.mjs";

const client = new OpenAI({ baseURL: at.v1, apiKey: at.key, maxRetries: 0 });
const model = at.model;
const sum = "What is 12 + 30?";
const greedy = { model, temperature: 0 };
const asked = [{ role: "user", content: sum }];
const question = [{ role: "user", content: "What is the weather in Paris?" }];
const person = z.object({ name: z.string(), age: z.number() });
const parameters = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};
const weather = { name: "get_weather", description: "The weather in a city", parameters };
const result = JSON.stringify({ temperature: 21 });

check("models", async () => {
  const names = [];
  for await (const one of client.models.list()) names.push(one.id);
  must(names.includes(model), names);
});
check("chat, streamed too", async () => {
  const whole = await client.chat.completions.create({ ...greedy, messages: asked, max_tokens: 400 });
  must(whole.choices[0].message.content.includes("42"), whole);
  const stream = client.chat.completions.stream({ ...greedy, messages: asked, max_tokens: 400 });
  const final = await stream.finalChatCompletion();
  must(final.choices[0].message.content === whole.choices[0].message.content, final);
});
check("chat, parse() handed back", async () => {
  const messages = [{ role: "user", content: "Ann is 30 years old. Name and age as JSON." }];
  const reply = await client.chat.completions.parse({
    ...greedy, messages, max_tokens: 400, response_format: zodResponseFormat(person, "person"),
  });
  must(typeof reply.choices[0].message.parsed.age === "number", reply);
  const again = await client.chat.completions.create({
    ...greedy, messages: [...messages, reply.choices[0].message, ...asked], max_tokens: 400,
  });
  must(again.choices[0].message.content, again);
});
check("chat, runTools()", async () => {
  const tool = { type: "function", function: { ...weather, parse: JSON.parse, function: () => result } };
  for (const stream of [false, true]) {
    const runner = client.chat.completions.runTools({ ...greedy, messages: [...question], tools: [tool], max_tokens: 400, stream });
    must((await runner.finalContent()).includes("21"), await runner.finalContent());
  }
});
check("completions, streamed too", async () => {
  const options = { ...greedy, prompt: "The capital of France is", max_tokens: 8 };
  const whole = await client.completions.create(options);
  let text = "";
  for await (const chunk of await client.completions.create({ ...options, stream: true })) text += chunk.choices[0]?.text ?? "";
  must(text === whole.choices[0].text, text);
});
check("responses, streamed too", async () => {
  const options = { ...greedy, input: sum, max_output_tokens: 400 };
  const whole = await client.responses.create(options);
  must(whole.output_text.includes("42"), whole);
  const final = await client.responses.stream(options).finalResponse();
  must(final.output_text === whole.output_text, final);
});
check("responses, parse() handed back", async () => {
  const input = [{ role: "user", content: "Ann is 30 years old. Name and age as JSON." }];
  const reply = await client.responses.parse({
    ...greedy, input, max_output_tokens: 400, text: { format: zodTextFormat(person, "person") },
  });
  must(typeof reply.output_parsed.age === "number", reply);
  const again = await client.responses.create({ ...greedy, input: [...input, ...reply.output, ...asked], max_output_tokens: 400 });
  must(again.output_text, again);
});
check("responses, tools: call handed back", async () => {
  const tools = [{ type: "function", strict: true, ...weather }];
  const reply = await client.responses.create({ ...greedy, input: question, tools, max_output_tokens: 400 });
  const call = reply.output.find((item) => item.type === "function_call");
  must(JSON.parse(call.arguments).city === "Paris", call);
  const output = { type: "function_call_output", call_id: call.call_id, output: result };
  const again = await client.responses.create({ ...greedy, input: [...question, ...reply.output, output], tools, max_output_tokens: 400 });
  must(again.output_text.includes("21"), again.output);
});
await main();
