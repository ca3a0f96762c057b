// The server: requests with a key, its errors, and streams of events.

import { keep, recall } from "/web/dom.js";

export class ApiError extends Error {
  constructor(status, code, message, retryAfter = null) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfter = retryAfter;
  }
}

export const getKey = () => recall("sessionStorage", "key") ?? "";
export const setKey = (key) => keep("sessionStorage", "key", key.trim());

const gone = () => new ApiError(0, "unreachable", "The server cannot be reached. Is it still running?");

async function call(path, options = {}) {
  const key = getKey();
  const headers = { ...options.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw gone();
  }
  // If the user entered another key in the meantime, it is tried before the page asks again.
  if (response.status === 401 && key !== getKey()) return call(path, options);
  if (!response.ok) throw await errorOf(response);
  return response;
}

async function errorOf(response) {
  let given = {};
  try {
    given = (await response.json()).error ?? {};
  } catch {
    // Perhaps the page of a proxy: the status says enough.
  }
  const message = given.message ?? `The server answered with status ${response.status}.`;
  return new ApiError(response.status, given.code ?? "", message, response.headers.get("retry-after"));
}

export const getJson = async (path) => (await call(path)).json();

/** Text, or an error after a while: a server that hangs is treated as one that cannot be reached. */
export async function getText(path, withinMs) {
  const response = await call(path, { signal: AbortSignal.timeout(withinMs) });
  try {
    return await response.text();
  } catch {
    throw gone();
  }
}

/** The chunks of one answer. Leaving early, or aborting `signal`, ends it on the server too. */
export async function* chat(body, signal) {
  const response = await call("/v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true }, return_token_ids: true }),
    signal,
  });
  let done = false;
  for await (const data of events(response.body)) {
    if (data === "[DONE]") {
      done = true;
      break;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(500, chunk.error.code, chunk.error.message);
    yield chunk;
  }
  if (!done) throw new ApiError(0, "cut", "The connection ended before the answer did.");
}

/** The data of each server-sent event. Ours have one line each. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "cut", "The connection ended before the answer did.");
  } finally {
    reader.cancel().catch(() => {});
  }
}
