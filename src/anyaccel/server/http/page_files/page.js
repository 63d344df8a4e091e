"use strict";
// The `anyaccel serve` web page: submits jobs, follows their events and shows their images.
// User input is only ever set as text, never as HTML.

const LIVE = ["sending", "queued", "running", "cancelling"];
const PREVIEWS = 3;
const POLL_MS = 3000, POLL_WHILE_STARTING_MS = 1000;
const MAX_STREAMS = 3; // browsers open at most six HTTP/1.1 connections per host
const RECENT = 20, PAGE = 100, MAX_LISTED = 1000;
const FAILURES_SHOWN_S = 600;
const KEY = "anyaccel.key"; // in sessionStorage, so the API key is deleted when the tab closes

const models = new Map(); // by id, the default first
const rows = new Map(); // rows of running and failed jobs, by job id
const gallery = new Map(); // finished images, by "job/index"
const finished = new Map(); // finished jobs, by id
const dismissed = new Set(), deleted = new Set();

const $ = (id) => document.getElementById(id);
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// Create an element. Skips attributes and children that are null; `on…` attributes add event listeners.
function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

function plural(count, singular, pluralForm) {
  return `${count} ${count === 1 ? singular : pluralForm}`;
}

// Announce a change to screen readers.
function announce(text) {
  $("announcement").textContent = text;
}

// Requests

class ServiceError extends Error {
  constructor(status, message, retryS = null) {
    super(message);
    this.status = status;
    this.retryS = retryS; // seconds until a retry makes sense, or null
  }
}

// Parse JSON. Integers above 2^53, such as large seeds, become strings of their digits.
function parse(text) {
  return JSON.parse(text, (name, value, context) => {
    const isUnsafe = typeof value === "number" && Number.isInteger(value) && !Number.isSafeInteger(value);
    return isUnsafe && context?.source ? context.source : value;
  });
}

async function request(path, options = {}) {
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
    const message = await readMessage(response);
    if (response.status !== 401) throw new ServiceError(response.status, message, readRetry(response));
    if (key === sessionStorage.getItem(KEY)) await askForKey(key ? message : ""); // otherwise another request has set a new key
  }
}

async function call(path, options) {
  return parse(await (await request(path, options)).text());
}

async function readMessage(response) {
  try {
    return parse(await response.text()).error.message;
  } catch (error) {
    return `the service returned ${response.status} ${response.statusText}`.trim();
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
async function* readEvents(response) {
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

// Running jobs

// Row of one request, shown from sending it until its images are finished.
class Row {
  constructor(body) {
    const count = body.n ?? 1;
    this.body = body;
    this.job = null;
    this.state = "sending";
    this.following = this.cancelRequested = false;
    this.tiles = Array.from({ length: count }, (_, index) => new ProgressTile(body.prompt, index, count));
    this.status = h("p", { class: "row-state" }, "sending …");
    this.actions = h("div", { class: "row-actions" });
    this.element = h("li", { class: "row" },
      h("div", { class: "row-head" }, h("p", { class: "row-prompt", title: body.prompt }, body.prompt), h("div", { class: "row-line" }, this.status, this.actions)),
      h("ol", { class: "tiles" }, this.tiles.map((tile) => tile.element)));
    this.setActions(["Cancel", () => this.cancel()]);
    this.show("sending", "sending …");
    $("rows").prepend(this.element);
    showEmpty();
  }

  show(state, text) {
    this.state = this.element.dataset.state = state;
    this.status.textContent = text;
  }

  setActions(...actions) {
    const hadFocus = this.actions.contains(document.activeElement);
    this.actions.replaceChildren(...actions.map(([name, onclick]) => h("button", { class: "plain", type: "button", onclick }, name)));
    if (hadFocus) this.actions.firstChild?.focus();
  }

  // Apply a job object from the service.
  update(job) {
    if (job.attempts < this.job?.attempts) return; // an outdated response
    this.job = job;
    rows.set(job.id, this);
    if (this.state === "cancelling" && job.state === "running") return; // response from before the cancellation
    if (job.state === "queued") this.show("queued", job.waiting ? `queued, ${plural(job.waiting, "job", "jobs")} ahead` : "queued, next in line");
    else if (job.state === "running" && (this.state !== "running" || !this.following)) {
      if (this.state !== "running") announce(`Generating: ${this.body.prompt}`);
      this.show("running", job.progress ? `${Math.round(100 * job.progress)}%` : "starting");
      for (const tile of this.tiles) tile.begin(job.progress);
    } else if (job.state === "cancelling") this.show("cancelling", "stopping at the next step");
    else if (job.state === "failed") this.fail(job.error?.message ?? "the job failed");
    else if (job.state === "cancelled") this.end("cancelled", "cancelled");
  }

  step({ index, done, total }) {
    this.tiles[index]?.step(done, total);
    if (this.state === "running") this.status.textContent = this.progressText();
  }

  progressText() {
    const count = this.tiles.length;
    const started = this.tiles.filter((tile) => tile.total);
    const [done, total] = started.reduce(([a, b], tile) => [a + tile.done, b + tile.total], [0, 0]);
    if (started.length && done === total && started.length === count) return "decoding";
    if (count === 1) return `step ${done} of ${total}`;
    // Images that have not started yet count with the average number of steps.
    return `${plural(count, "image", "images")}, ${Math.round((100 * done) / (total / started.length * count))}%`;
  }

  preview({ index, image }) {
    this.tiles[index]?.preview(image);
    announce(`Preview: ${this.status.textContent}`);
  }

  fail(message) {
    this.end("failed", message);
  }

  end(state, message) {
    if (this.state === state) return;
    this.show(state, message);
    this.setActions(["Try again", () => { this.remove(); generate(this.body); }], ["Dismiss", () => this.remove()]);
    announce(`${state}: ${message}`);
  }

  async cancel() {
    this.cancelRequested = true;
    if (!this.job) return this.show("cancelling", "cancelling"); // not accepted yet: `generate` cancels it
    this.show("cancelling", "stopping at the next step");
    try {
      updateJob(await call(`/v1/jobs/${this.job.id}/cancel`, { method: "POST" }));
    } catch (error) {
      this.show("running", `cannot cancel: ${error.message}`);
    }
  }

  remove() {
    const hadFocus = this.element.contains(document.activeElement);
    this.element.remove();
    this.state = "removed";
    if (this.job) {
      rows.delete(this.job.id);
      dismissed.add(this.job.id);
    }
    if (hadFocus) $("prompt").focus();
    showEmpty();
  }
}

// Tile of one unfinished image: preview and progress bar.
class ProgressTile {
  constructor(prompt, index, count) {
    this.done = this.total = 0;
    this.image = h("img", { alt: "", hidden: true });
    this.prompt = prompt;
    this.frame = h("div", { class: "frame" }, this.image);
    this.bar = h("progress", { max: 1, value: 0, "aria-label": count > 1 ? `Progress of image ${index + 1} of ${count}` : "Progress" });
    this.element = h("li", { class: "running" }, this.frame, this.bar);
  }

  begin(progress) {
    this.done = this.total = 0;
    this.bar.value = progress;
  }

  step(done, total) {
    [this.done, this.total] = [done, total];
    this.bar.value = done / total;
  }

  preview(url) {
    if (!url.startsWith("data:image/")) return;
    this.image.src = url;
    this.image.alt = `Preview: ${this.prompt}`;
    this.image.hidden = false;
    this.frame.classList.add("has-preview");
  }
}

// Submit a job. Retries after the time in the Retry-After header if the queue is full or the service is starting.
async function generate(body) {
  const seed = body.seed ?? String(crypto.getRandomValues(new Uint32Array(1))[0]);
  const payload = { ...body, seed, partial_images: PREVIEWS };
  const row = new Row(body);
  // The idempotency key makes a retry safe: if only the response was lost, no second job is created.
  const key = Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
  const options = { method: "POST", body: toJson(payload), headers: { "Content-Type": "application/json", "Idempotency-Key": key } };
  for (;;) {
    try {
      updateJob(await call("/v1/jobs", options), row);
      if (row.cancelRequested) await row.cancel();
      return;
    } catch (error) {
      if (row.cancelRequested) return row.end("cancelled", "cancelled");
      if (error.retryS === null) return row.fail(error.message);
      if (!(await countDown(row, error))) return row.end("cancelled", "cancelled");
    }
  }
}

async function countDown(row, error) {
  const message = error.message.replace(/; try again in \d+ s$/, "");
  for (let left = error.retryS; left > 0; left -= 1) {
    row.show("sending", `${message} – retrying in ${left} s`);
    await sleep(1000);
    if (row.cancelRequested) return false;
  }
  row.show("sending", "sending …");
  return true;
}

// Serialize a request. The seed is written as digits, because it may be larger than 2^53.
function toJson({ seed, ...fields }) {
  return `{"seed":${BigInt(seed)},${JSON.stringify(fields).slice(1)}`;
}

// Show a job object: finished jobs in the gallery, others in their row.
function updateJob(job, row = rows.get(job.id)) {
  if (deleted.has(job.id)) return; // an outdated response
  if (job.state === "done") {
    rows.delete(job.id);
    addToGallery(job);
    if (!row) return;
    row.job = job;
    row.remove();
    announce(`Done: ${job.request.prompt}`);
  } else if (row) row.update(job);
  else if (isShown(job)) new Row({ ...readSettings(job, job.request.seeds[0]), n: job.request.seeds.length }).update(job);
  followSome();
}

// Return whether to add a row for a job from another tab or from before a reload.
function isShown(job) {
  if (dismissed.has(job.id)) return false;
  // A row in state "sending" has no job id yet and may be this job.
  if (LIVE.includes(job.state)) return ![...document.querySelectorAll('.row[data-state="sending"]')].length;
  return job.state === "failed" && Date.now() / 1000 - job.ended_at < FAILURES_SHOWN_S;
}

function listLive() {
  return [...rows.values()].filter((row) => LIVE.includes(row.state));
}

// Follow the running jobs first, then the oldest queued ones, up to MAX_STREAMS at the same time.
function followSome() {
  const live = listLive();
  let free = MAX_STREAMS - live.filter((row) => row.following).length;
  const order = (row) => (row.job.state === "queued" ? 1e12 : 0) + row.job.created_at;
  for (const row of live.filter((candidate) => !candidate.following).sort((a, b) => order(a) - order(b))) {
    if (free-- > 0) follow(row);
  }
}

// Follow the events of a job until it ends; reconnect if the connection breaks.
async function follow(row) {
  row.following = true;
  for (let delay = 500; LIVE.includes(row.state); delay = Math.min(8000, 2 * delay)) {
    try {
      const response = await request(`/v1/jobs/${row.job.id}/events`);
      for await (const [kind, data] of readEvents(response)) {
        delay = 500;
        if (kind === "step") row.step(data);
        else if (kind === "preview") row.preview(data);
        else if (kind === "state" && row.state !== "removed") updateJob(data, row);
      }
    } catch (error) {
      if (error.status === 404) row.fail(error.message);
    }
    if (LIVE.includes(row.state)) await sleep(delay);
  }
  row.following = false;
  followSome();
  poll();
}

// Gallery

function addToGallery(job) {
  if (finished.has(job.id)) return;
  finished.set(job.id, job);
  job.images.forEach((image, index) => {
    const item = { job, image, index };
    const { prompt } = job.request;
    const thumbnail = h("img", { src: image.url, alt: prompt, title: prompt, loading: "lazy", decoding: "async", width: image.width, height: image.height });
    const button = h("button", { class: "tile", type: "button", onclick: () => openViewer(item) }, thumbnail);
    item.element = h("li", { "data-seed": image.seed }, button);
    gallery.set(`${job.id}/${index}`, item);
  });
  sortGallery();
}

// Gallery items, the newest job first.
function listItems() {
  return [...gallery.values()].sort((a, b) => b.job.created_at - a.job.created_at || a.index - b.index);
}

function sortGallery() {
  const list = $("gallery");
  // Move only elements in the wrong position: moving the focused element would remove its focus.
  listItems().forEach((item, position) => {
    if (list.children[position] !== item.element) list.insertBefore(item.element, list.children[position] ?? null);
  });
  showEmpty();
}

function removeJob(id) {
  deleted.add(id);
  finished.delete(id);
  for (const item of [...gallery.values()].filter(({ job }) => job.id === id)) {
    item.element.remove();
    gallery.delete(`${id}/${item.index}`);
  }
  showEmpty();
}

let loaded = false, listed = PAGE;

function showEmpty() {
  $("empty").hidden = !loaded || gallery.size > 0 || $("rows").childElementCount > 0;
}

// Fetch the newest jobs, and remove those that were deleted elsewhere.
async function refresh(limit) {
  const before = [...finished.values()];
  const { data } = await call(`/v1/jobs?limit=${limit}`);
  const ids = new Set(data.map((job) => job.id));
  const oldest = data.length < limit ? 0 : data[data.length - 1].created_at;
  for (const job of before) if (job.created_at >= oldest && !ids.has(job.id)) removeJob(job.id);
  for (const job of data.reverse()) updateJob(job);
  if (limit >= listed) $("older").hidden = data.length < limit || limit >= MAX_LISTED;
  loaded = true;
  showEmpty();
}

// Image viewer

let current = null; // the gallery item in the viewer

function openViewer(item) {
  current = item;
  const { job, image } = item;
  const large = $("large");
  large.src = image.url;
  large.alt = job.request.prompt;
  large.width = image.width;
  large.height = image.height;
  large.style.maxWidth = `${Math.max(image.width, Math.min(4 * image.width, 768))}px`; // enlarge small images, up to four times
  $("viewer-prompt").textContent = job.request.prompt;
  $("facts").replaceChildren(...listFacts(item).flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, String(value))]));
  $("download").href = image.url;
  $("download").download = makeFileName(item);
  const isEdit = job.request.task !== "generate"; // the input image is not stored
  $("again").hidden = $("vary").hidden = isEdit;
  confirmDelete(false);
  $("viewer-error").textContent = "";
  const items = listItems(), position = items.indexOf(item);
  $("position").textContent = `${position + 1} of ${items.length}`;
  $("newer").disabled = position <= 0;
  $("next").disabled = position < 0 || position >= items.length - 1;
  if (!$("viewer").open) {
    $("viewer").showModal();
    $("viewer-prompt").focus();
  } else if (!$("viewer").contains(document.activeElement) || document.activeElement.disabled) $("viewer-prompt").focus();
}

function listFacts({ job, image }) {
  const settings = job.request, model = models.get(settings.model);
  const unset = "model default";
  return [
    ["Negative prompt", settings.negative_prompt],
    ["Seed", image.seed],
    ["Size", `${image.width} × ${image.height}`],
    ["Steps", settings.num_inference_steps ?? model?.num_inference_steps ?? unset],
    ["Guidance", settings.guidance_scale ?? model?.guidance_scale ?? unset],
    ["Strength", settings.strength],
    ["LoRA", settings.lora && `${settings.lora} × ${settings.lora_scale}`],
    ["Model", settings.model],
    ["Time", `${image.seconds.toFixed(image.seconds < 10 ? 1 : 0)} s`],
    ["Created", new Date(1000 * job.ended_at).toLocaleString()],
  ].filter(([, value]) => value !== null && value !== undefined && value !== "");
}

function makeFileName({ job, image }) {
  const slug = job.request.prompt.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60).replace(/^-+|-+$/g, "");
  return `${slug || "image"}-${image.seed}.${job.request.output_format.replace("jpeg", "jpg")}`;
}

// Return the settings of a job as the body of a new request.
function readSettings({ request: settings }, seed) {
  const { prompt, negative_prompt, model, num_inference_steps, guidance_scale, lora, output_format } = settings;
  const body = { prompt, negative_prompt, model, num_inference_steps, guidance_scale, lora, output_format, seed };
  body.size = `${settings.width}x${settings.height}`;
  body.lora_scale = lora ? settings.lora_scale : null;
  return Object.fromEntries(Object.entries(body).filter(([, value]) => value !== null && value !== undefined));
}

function showNeighbor(offset) {
  const items = listItems(), next = items[items.indexOf(current) + offset];
  if (next) openViewer(next);
}

// Switch the delete button between "Delete" and its confirmation.
function confirmDelete(armed) {
  const count = current.job.images.length;
  $("delete").dataset.armed = armed ? "yes" : "";
  $("delete").textContent = armed ? (count > 1 ? `Delete all ${count} images of this request?` : "Delete this image?") : "Delete";
}

async function deleteCurrent() {
  if (!$("delete").dataset.armed) return confirmDelete(true);
  const { job } = current, items = listItems(), position = items.indexOf(current);
  const isOther = (item) => item.job !== job;
  const next = items.slice(position).find(isOther) ?? items.slice(0, position).reverse().find(isOther);
  try {
    await call(`/v1/jobs/${job.id}`, { method: "DELETE" });
  } catch (error) {
    if (error.status !== 404) return void ($("viewer-error").textContent = error.message);
  }
  removeJob(job.id);
  announce("Deleted");
  if (next) openViewer(next);
  else $("viewer").close();
}

// Copy the settings of an image into the form, without its seed.
function reuse({ job, image }) {
  const settings = job.request;
  if (models.has(settings.model)) $("model").value = settings.model;
  showModel();
  $("prompt").value = settings.prompt;
  $("negative").value = settings.negative_prompt ?? "";
  $("more").open ||= Boolean(settings.negative_prompt || settings.lora);
  setSize(image.width, image.height);
  if (settings.num_inference_steps !== null) $("steps").value = settings.num_inference_steps;
  if (settings.guidance_scale !== null) $("guidance").value = settings.guidance_scale;
  $("lora").value = settings.lora ?? "";
  $("lora-scale").value = settings.lora_scale ?? 1;
}

// Form

function currentModel() {
  return models.get($("model").value);
}

// Show the options and defaults of the selected model.
function showModel() {
  const model = currentModel();
  if (!model) return;
  const sizes = model.sizes.map((size) => h("option", { value: size }, size.replace("x", " × ")));
  $("size").replaceChildren(...sizes, ...(model.other_sizes ? [h("option", { value: "other" }, "custom …")] : []));
  const [width, height] = model.sizes[0].split("x");
  for (const [id, side] of [["width", width], ["height", height]]) {
    $(id).value = side;
    $(id).step = $(id).min = model.multiple;
  }
  $("steps").value = model.num_inference_steps ?? "";
  $("guidance").value = model.guidance_scale ?? "";
  $("lora").replaceChildren(h("option", { value: "" }, "none"), ...model.loras.map((name) => h("option", { value: name }, name)));
  $("lora-field").hidden = $("lora-scale-field").hidden = !model.loras.length;
  showSize();
}

function showSize() {
  const isOther = $("size").value === "other";
  $("other-size").hidden = !isOther;
  $("width").disabled = $("height").disabled = !isOther;
}

function setSize(width, height) {
  const size = `${width}x${height}`, options = [...$("size").options].map((option) => option.value);
  if (options.includes(size)) $("size").value = size;
  else if (options.includes("other")) {
    $("size").value = "other";
    [$("width").value, $("height").value] = [width, height];
  }
  showSize();
}

// Return the form as a request body, without values equal to the model's default: not every model accepts them.
function readForm() {
  const model = currentModel();
  const body = { prompt: $("prompt").value.trim(), n: Number($("count").value) };
  if (model) body.model = model.id;
  const size = $("size").value;
  if (size) body.size = size === "other" ? `${$("width").value}x${$("height").value}` : size;
  const numbers = { num_inference_steps: $("steps").value, guidance_scale: $("guidance").value };
  for (const [name, value] of Object.entries(numbers)) {
    if (value !== "" && Number(value) !== model?.[name]) body[name] = Number(value);
  }
  if ($("negative").value.trim()) body.negative_prompt = $("negative").value.trim();
  if ($("seed").value.trim()) body.seed = $("seed").value.trim();
  if ($("lora").value) [body.lora, body.lora_scale] = [$("lora").value, Number($("lora-scale").value || 1)];
  return body;
}

async function loadModels() {
  const { data } = await call("/v1/models");
  models.clear();
  for (const model of data) models.set(model.id, model);
  $("model").replaceChildren(...data.map((model) => h("option", { value: model.id }, model.id)));
  $("model-field").hidden = data.length < 2;
  showModel();
}

// Status of the service

let shownDevices = "";

function showStatus(status) {
  const { queued, running, limits } = status;
  const parts = [running ? `${running} running` : "", queued ? `${queued} queued` : ""].filter(Boolean);
  $("queue").textContent = status.state === "ready" ? parts.join(", ") || "ready" : status.state;
  notify({
    starting: status.doing === "starting" ? "The service is starting." : `The service is starting: ${status.doing}.`,
    broken: `The service cannot start: ${status.doing}.`,
    ending: "The service is shutting down and does not accept new requests.",
  }[status.state] ?? "");
  $("steps").max = limits.max_steps;
  $("count").max = limits.max_n;
  $("prompt").maxLength = $("negative").maxLength = limits.max_prompt;
  showDevices(status);
}

function notify(message) {
  if ($("notice").textContent !== message) $("notice").textContent = message;
  $("notice").hidden = !message;
}

function showDevices({ models: served, version }) {
  const snapshot = JSON.stringify([served, version, models.size]);
  if (snapshot === shownDevices) return; // rebuilding would close an open plan
  shownDevices = snapshot;
  $("device").hidden = !served.length;
  $("device").replaceChildren(...served.map((model) => {
    const description = [`${model.name} on ${model.device}`, models.get(model.name)?.dtype].filter(Boolean).join(", ");
    return h("div", {},
      model.virtual ? h("p", { class: "virtual" }, "virtual device: emulated on the CPU") : null,
      h("details", {},
        h("summary", {}, "Plan", h("span", { class: "muted" }, ` of ${description}`)),
        h("pre", { class: "plan", tabindex: 0, role: "region", "aria-label": `Plan of ${model.name}` }, model.plan)));
  }));
  $("version").textContent = version;
}

let polling = false, timer = 0;

// Poll the status now and every few seconds, except while the page is hidden.
async function poll() {
  if (polling || document.hidden) return;
  polling = true;
  clearTimeout(timer);
  let delay = POLL_WHILE_STARTING_MS;
  try {
    const status = await call("/v1/status");
    const served = status.models.map((model) => model.name).join("\n");
    if (served && served !== [...models.keys()].join("\n")) await loadModels();
    showStatus(status);
    if (!loaded) await refresh(listed);
    else if (status.queued + status.running || listLive().length) await refresh(RECENT);
    if (status.state === "ready") delay = POLL_MS;
  } catch (error) {
    if (!(error instanceof ServiceError)) throw error;
    $("queue").textContent = "";
    notify(error.status ? `The service returned an error: ${error.message}.` : "The service does not respond. Retrying.");
    delay = POLL_MS;
  } finally {
    polling = false;
    timer = setTimeout(poll, delay);
  }
}

// User actions

function addFormListeners() {
  $("generate-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const body = readForm();
    if (!body.prompt) return $("prompt").focus();
    generate(body);
  });
  // Open the details that contain an invalid field: the browser cannot focus a hidden one.
  $("generate-form").addEventListener("invalid", (event) => ($("more").open ||= $("more").contains(event.target)), true);
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return; // Enter also ends an IME composition
    event.preventDefault();
    $("generate-form").requestSubmit();
  });
  $("model").addEventListener("change", showModel);
  $("size").addEventListener("change", () => {
    showSize();
    if ($("size").value === "other") $("width").focus();
  });
  $("older").addEventListener("click", () => {
    listed = Math.min(MAX_LISTED, listed + PAGE);
    refresh(listed).catch((error) => notify(`${error.message}.`));
  });
  document.addEventListener("visibilitychange", () => {
    loaded &&= document.hidden; // reload the whole list when the page becomes visible again
    poll();
  });
}

function addViewerListeners() {
  const viewer = $("viewer");
  const closeAnd = (action) => () => {
    const item = current;
    viewer.close();
    action(item);
  };
  viewer.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
    const offset = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!offset) return;
    event.preventDefault();
    showNeighbor(offset);
  });
  viewer.addEventListener("click", (event) => event.target === viewer && viewer.close());
  viewer.addEventListener("close", () => {
    current?.element.querySelector("button").focus();
    current = null;
  });
  $("close").addEventListener("click", () => viewer.close());
  $("newer").addEventListener("click", () => showNeighbor(-1));
  $("next").addEventListener("click", () => showNeighbor(1));
  $("again").addEventListener("click", closeAnd((item) => generate(readSettings(item.job, item.image.seed))));
  $("vary").addEventListener("click", closeAnd((item) => generate(readSettings(item.job, null))));
  $("reuse").addEventListener("click", closeAnd((item) => {
    reuse(item);
    current = null; // the focus goes to the prompt, not back to the tile
    $("prompt").focus();
  }));
  $("delete").addEventListener("click", deleteCurrent);
  $("delete").addEventListener("blur", () => current && confirmDelete(false));
}

addFormListeners();
addViewerListeners();
if (matchMedia("(min-width: 900px)").matches) $("prompt").focus(); // on a phone it would open the keyboard
poll();
