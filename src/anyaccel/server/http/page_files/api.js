// Requests to the service: errors, the API key, JSON with large integers, and server-sent events.
import { $ } from "./dom.js";

const KEY = "anyaccel.key"; // in sessionStorage, so the API key is deleted when the tab closes

export class ServiceError extends Error {
  constructor(status, message, retryS = null, param = null) {
    super(message);
    this.status = status;
    this.retryS = retryS; // seconds until a retry makes sense, or null
    this.param = param; // name of the invalid parameter, or null
  }
}

// Parse JSON. Integers above 2^53, such as large seeds, become strings of their digits.
function parse(text) {
  return JSON.parse(text, (name, value, context) => {
    const isUnsafe = typeof value === "number" && Number.isInteger(value) && !Number.isSafeInteger(value);
    return isUnsafe && context?.source ? context.source : value;
  });
}

// Serialize a request. The seed is written as digits, because it may be larger than 2^53.
export function toJson({ seed, ...fields }) {
  return `{"seed":${BigInt(seed)},${JSON.stringify(fields).slice(1)}`;
}

export async function request(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
    let response;
    try {
      response = await fetch(path, { ...options, headers });
    } catch (error) {
      throw new ServiceError(0, "the service does not respond");
    }
    if (response.ok) return response;
    const { message, param } = await readError(response);
    if (response.status !== 401) throw new ServiceError(response.status, message, readRetry(response), param);
    if (key === sessionStorage.getItem(KEY)) await askForKey(key ? message : ""); // otherwise another request has set a new key
  }
}

export async function call(path, options) {
  return parse(await (await request(path, options)).text());
}

async function readError(response) {
  try {
    return parse(await response.text()).error;
  } catch (error) {
    return { message: `the service returned ${response.status} ${response.statusText}`.trim() };
  }
}

function readRetry(response) {
  const seconds = Number(response.headers.get("Retry-After"));
  return [429, 503].includes(response.status) && seconds > 0 ? seconds : null;
}

let keyPromise = null;

// Show the key form and resolve when a key is entered. Concurrent requests share one promise.
function askForKey(message) {
  $("key-error").textContent = message;
  keyPromise ??= new Promise((resolve) => {
    $("key-form").hidden = false;
    $("generate-form").hidden = true;
    $("queue").textContent = "";
    $("key").focus();
    $("key-form").onsubmit = (event) => {
      event.preventDefault();
      sessionStorage.setItem(KEY, $("key").value.trim());
      $("key").value = "";
      $("key-form").hidden = true;
      $("generate-form").hidden = false;
      $("prompt").focus();
      keyPromise = null;
      resolve();
    };
  });
  return keyPromise;
}

// Yield the server-sent events of a response as [kind, data].
export async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let incomplete = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (incomplete + value).split("\n\n");
    incomplete = blocks.pop();
    for (const block of blocks) {
      const fields = Object.fromEntries(block.split("\n").map((line) => line.split(/: (.*)/s, 2)));
      if (fields.data) yield [fields.event, parse(fields.data)];
    }
  }
}
