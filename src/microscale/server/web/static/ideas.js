// Questions to begin with, by the model that is served.

import { $, h } from "/web/dom.js";

const IDEAS = [
  ["Explain", "block scaling in number formats, with an example."],
  ["Write", "a Python function that merges overlapping intervals."],
  ["Compare", "mixture-of-experts and dense models in a table."],
  ["Plan", "a week of simple dinners for two."],
];
// The embedded model was trained on these kinds of questions.
const DEMO = "microscale-demo";
const DEMO_ABOUT = "This is a toy of 30 million parameters: it knows little, and its answers may be wrong.";
const DEMO_HINT = "Ask for a sum, a capital, a word, a date";
const WEATHER = {
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather of a city.",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
};
const DEMO_IDEAS = [
  ["What is", "247 + 385?"],
  ["What is the capital of", "Peru?"],
  ["Tell me", "a short story about a fox."],
  ["What is the weather in", "Paris?", WEATHER],
];

/** Show the questions for a model. `onAsk` gets the text and the functions that the question needs. */
export function showIdeas(model, onAsk) {
  const demo = model === DEMO;
  if (demo) {
    $("facts").textContent += ` ${DEMO_ABOUT}`;
    $("prompt").placeholder = DEMO_HINT;
  }
  $("ideas").replaceChildren(...(demo ? DEMO_IDEAS : IDEAS).map(([verb, rest, tool]) => {
    const ask = () => onAsk(`${verb} ${rest}`, tool ? [tool] : []);
    const note = tool ? h("small", {}, ` offers ${tool.function.name}`) : "";
    return h("li", {}, h("button", { type: "button", onclick: ask }, h("b", {}, verb), ` ${rest.replace(/\.$/, "")}`, note));
  }));
}
