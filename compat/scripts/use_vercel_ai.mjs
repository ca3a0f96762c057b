// Vercel's AI SDK: its OpenAI provider (Responses, its default, and chat) and the one for compatible servers.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { at, check, main, must } from "./checks.mjs";

const openai = createOpenAI({ baseURL: at.v1, apiKey: at.key });
const compatible = createOpenAICompatible({ name: "microscale", baseURL: at.v1, apiKey: at.key, includeUsage: true, supportsStructuredOutputs: true });
const models = {
  responses: openai(at.model),
  chat: openai.chat(at.model),
  compatible: compatible(at.model),
};
const options = { maxRetries: 0, temperature: 0, maxOutputTokens: 400 };
const weather = tool({
  description: "The weather in a city",
  inputSchema: z.object({ city: z.string() }),
  execute: async () => ({ temperature: 21 }),
});
const question = "What is the weather in Paris?";

for (const [name, model] of Object.entries(models)) {
  check(`${name}: generateText`, async () => {
    const result = await generateText({ model, prompt: "What is 12 + 30?", ...options });
    must(result.text.includes("42"), result.text);
    must(result.usage.outputTokens > 0, result.usage);
    must(result.finishReason === "stop", result.finishReason);
  });
  check(`${name}: streamText`, async () => {
    const result = streamText({ model, prompt: "What is 12 + 30?", ...options, onError() {} });
    let text = "";
    for await (const part of result.fullStream) {
      if (part.type === "error") throw part.error;
      if (part.type === "text-delta") text += part.text;
    }
    must(text.includes("42"), text);
    must((await result.usage).outputTokens > 0, "usage");
  });
  check(`${name}: tools, several steps`, async () => {
    const result = await generateText({ model, tools: { weather }, prompt: question, stopWhen: stepCountIs(3), ...options });
    must(result.steps.length >= 2, `${result.steps.length} steps: ${result.text}`);
    must(result.steps[0].toolCalls[0]?.input.city === "Paris", result.steps[0].toolCalls);
    must(result.text.includes("21"), result.text);
  });
  check(`${name}: tools, several steps, streamed`, async () => {
    const result = streamText({ model, tools: { weather }, prompt: question, stopWhen: stepCountIs(3), ...options, onError() {} });
    for await (const part of result.fullStream) if (part.type === "error") throw part.error;
    must((await result.steps).length >= 2, "steps");
    must((await result.text).includes("21"), await result.text);
  });
  check(`${name}: tools, messages handed back`, async () => {
    const messages = [{ role: "user", content: question }];
    const first = await generateText({ model, tools: { weather }, messages, stopWhen: stepCountIs(3), ...options });
    messages.push(...first.response.messages, { role: "user", content: "What is 12 + 30?" });
    const second = await generateText({ model, tools: { weather }, messages, ...options });
    must(second.finishReason === "stop" || second.finishReason === "tool-calls", second.finishReason);
  });
  check(`${name}: structured output`, async () => {
    const schema = z.object({ name: z.string(), age: z.number() });
    const result = await generateText({ model, output: Output.object({ schema }), prompt: "Ann is 30 years old. Name and age as JSON.", ...options });
    must(typeof result.output.age === "number", result.output);
  });
}
await main();
