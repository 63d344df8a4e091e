"use strict";
// The page of `anyaccel serve`: asks for pictures as jobs, listens to them, and keeps those that are done at hand.
// What people wrote is only ever set as text.

const LIVE = ["sending", "queued", "running", "cancelling"];
const PREVIEWS = 3;
const LOOK_MS = 3000, LOOK_WHILE_STARTING_MS = 1000;
const MOST_STREAMS = 3; // of the six connections that a browser opens to one host
const RECENT = 20, PAGE = 100, MOST_LISTED = 1000;
const FAILURES_SHOWN_S = 600;
const KEY = "anyaccel.key";

const models = new Map(); // by id, the default first
const rows = new Map(); // jobs under way or ended without a picture, by id
const pictures = new Map(); // those that are done, by "job/place"
const done = new Map(); // jobs that are done, by id
const dismissed = new Set(), deleted = new Set();

const $ = (id) => document.getElementById(id);
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// An element: attributes that are null or false are left out, `onclick` listens, children that are null are left out.
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

function plural(count, one, many) {
  return `${count} ${count === 1 ? one : many}`;
}

// What a screen reader says.
function say(words) {
  $("said").textContent = words;
}

// Talking to the service

class Refused extends Error {
  constructor(status, message, retryS = null) {
    super(message);
    this.status = status;
    this.retryS = retryS; // when it is worth while to try again, in seconds
  }
}

// JSON in which a whole number that JavaScript cannot hold, such as a large seed, stays as its digits.
function parse(text) {
  return JSON.parse(text, (name, value, context) => {
    const isLost = typeof value === "number" && Number.isInteger(value) && !Number.isSafeInteger(value);
    return isLost && context?.source ? context.source : value;
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
      throw new Refused(0, "the service does not answer");
    }
    if (response.ok) return response;
    const words = await readWords(response);
    if (response.status !== 401) throw new Refused(response.status, words, readRetry(response));
    if (key === sessionStorage.getItem(KEY)) await askForKey(key ? words : "");
  }
}

async function call(path, options) {
  return parse(await (await request(path, options)).text());
}

async function readWords(response) {
  try {
    return parse(await response.text()).error.message;
  } catch (error) {
    return `the service answers ${response.status} ${response.statusText}`.trim();
  }
}

function readRetry(response) {
  const seconds = Number(response.headers.get("Retry-After"));
  return [429, 503].includes(response.status) && seconds > 0 ? seconds : null;
}

let keyAsked = null;

// Resolves when a key was given; all that wait for one wait for the same.
function askForKey(words) {
  $("key-says").textContent = words;
  keyAsked ??= new Promise((resolve) => {
    $("key-form").hidden = false;
    $("make").hidden = true;
    $("queue").textContent = "";
    $("key").focus();
    $("key-form").onsubmit = (event) => {
      event.preventDefault();
      sessionStorage.setItem(KEY, $("key").value.trim());
      $("key").value = "";
      $("key-form").hidden = true;
      $("make").hidden = false;
      $("prompt").focus();
      keyAsked = null;
      resolve();
    };
  });
  return keyAsked;
}

// The events of a job: their kinds and what they tell.
async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done: ended } = await reader.read();
    if (ended) return;
    const parts = (held + value).split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const fields = Object.fromEntries(part.split("\n").map((line) => line.split(/: (.*)/s, 2)));
      if (fields.data) yield [fields.event, parse(fields.data)];
    }
  }
}

// Jobs under way

// One request on the page, from when it is sent until its pictures are there.
class Row {
  constructor(body) {
    const count = body.n ?? 1;
    this.body = body;
    this.job = null;
    this.state = "sending";
    this.following = this.dropped = false;
    this.makings = Array.from({ length: count }, (_, place) => new Making(body.prompt, place, count));
    this.words = h("p", { class: "row-state" }, "sending …");
    this.actions = h("div", { class: "row-actions" });
    this.element = h("li", { class: "row" },
      h("div", { class: "row-head" }, h("p", { class: "row-prompt", title: body.prompt }, body.prompt), h("div", { class: "row-line" }, this.words, this.actions)),
      h("ol", { class: "tiles" }, this.makings.map((one) => one.element)));
    this.offer(["Cancel", () => this.cancel()]);
    this.show("sending", "sending …");
    $("rows").prepend(this.element);
    showEmpty();
  }

  show(state, words) {
    this.state = this.element.dataset.state = state;
    this.words.textContent = words;
  }

  offer(...actions) {
    const hadFocus = this.actions.contains(document.activeElement);
    this.actions.replaceChildren(...actions.map(([name, onclick]) => h("button", { class: "plain", type: "button", onclick }, name)));
    if (hadFocus) this.actions.firstChild?.focus();
  }

  // What the service says of the job.
  update(job) {
    if (job.attempts < this.job?.attempts) return; // overtaken by what came since
    this.job = job;
    rows.set(job.id, this);
    if (this.state === "cancelling" && job.state === "running") return; // this answer is older than the wish
    if (job.state === "queued") this.show("queued", `waits: ${job.waiting ? `${job.waiting} before it` : "it is next"}`);
    else if (job.state === "running" && (this.state !== "running" || !this.following)) {
      if (this.state !== "running") say(`Making: ${this.body.prompt}`);
      this.show("running", job.progress ? `${Math.round(100 * job.progress)} %` : "begins");
      for (const one of this.makings) one.begin(job.progress);
    } else if (job.state === "cancelling") this.show("cancelling", "stops at the next step");
    else if (job.state === "failed") this.fail(job.error?.message ?? "it failed");
    else if (job.state === "cancelled") this.end("cancelled", "cancelled");
  }

  step({ picture, done: taken, total }) {
    this.makings[picture]?.step(taken, total);
    if (this.state === "running") this.words.textContent = this.tell();
  }

  tell() {
    const known = this.makings.filter((one) => one.total);
    const [taken, total] = known.reduce(([a, b], one) => [a + one.taken, b + one.total], [0, 0]);
    if (known.length && taken === total && known.length === this.makings.length) return "the last touches";
    if (this.makings.length === 1) return `step ${taken} of ${total}`;
    return `${plural(this.makings.length, "picture", "pictures")}, ${Math.round((100 * taken) / (total / known.length * this.makings.length))} %`;
  }

  preview({ picture, image }) {
    this.makings[picture]?.preview(image);
    say(`A preview: ${this.words.textContent}`);
  }

  fail(words) {
    this.end("failed", words);
  }

  end(state, words) {
    if (this.state === state) return;
    this.show(state, words);
    this.offer(["Try again", () => { this.remove(); make(this.body); }], ["Dismiss", () => this.remove()]);
    say(`${state}: ${words}`);
  }

  async cancel() {
    this.dropped = true;
    if (!this.job) return this.show("cancelling", "is not sent again"); // `make` sees to the rest
    this.show("cancelling", "stops at the next step");
    try {
      take(await call(`/v1/jobs/${this.job.id}/cancel`, { method: "POST" }));
    } catch (error) {
      this.show("running", `it could not be cancelled: ${error.message}`);
    }
  }

  remove() {
    const hadFocus = this.element.contains(document.activeElement);
    this.element.remove();
    this.state = "gone";
    if (this.job) {
      rows.delete(this.job.id);
      dismissed.add(this.job.id);
    }
    if (hadFocus) $("prompt").focus();
    showEmpty();
  }
}

// One picture that is being made.
class Making {
  constructor(prompt, place, count) {
    this.taken = this.total = 0;
    this.image = h("img", { alt: "", hidden: true });
    this.prompt = prompt;
    this.frame = h("div", { class: "frame" }, this.image);
    this.bar = h("progress", { max: 1, value: 0, "aria-label": count > 1 ? `Progress of picture ${place + 1} of ${count}` : "Progress" });
    this.element = h("li", { class: "making" }, this.frame, this.bar);
  }

  begin(share) {
    this.taken = this.total = 0;
    this.bar.value = share;
  }

  step(taken, total) {
    [this.taken, this.total] = [taken, total];
    this.bar.value = taken / total;
  }

  preview(address) {
    if (!address.startsWith("data:image/")) return;
    this.image.src = address;
    this.image.alt = `Preview: ${this.prompt}`;
    this.image.hidden = false;
    this.frame.classList.add("seen");
  }
}

// Ask for pictures; one that is refused for now is asked for again when the service says so.
async function make(body) {
  const seed = body.seed ?? String(crypto.getRandomValues(new Uint32Array(1))[0]);
  const known = { ...body, seed, partial_images: PREVIEWS };
  const row = new Row(body);
  const key = Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
  const sent = { method: "POST", body: write(known), headers: { "Content-Type": "application/json", "Idempotency-Key": key } };
  for (;;) {
    try {
      const job = await call("/v1/jobs", sent);
      take(job, row);
      if (row.dropped) await row.cancel();
      return;
    } catch (error) {
      if (row.dropped) return row.end("cancelled", "cancelled");
      if (error.retryS === null) return row.fail(error.message);
      if (!(await countDown(row, error))) return row.end("cancelled", "cancelled");
    }
  }
}

async function countDown(row, error) {
  const words = error.message.replace(/; try again in \d+ s$/, "");
  for (let left = error.retryS; left > 0; left -= 1) {
    row.show("sending", `${words} – sent again in ${left} s`);
    await sleep(1000);
    if (row.dropped) return false;
  }
  row.show("sending", "sending …");
  return true;
}

// A request as JSON; the seed is written as its digits, since it may be larger than what JavaScript counts with.
function write({ seed, ...rest }) {
  return `{"seed":${BigInt(seed)},${JSON.stringify(rest).slice(1)}`;
}

// Whatever is known of a job goes where it belongs.
function take(job, row = rows.get(job.id)) {
  if (deleted.has(job.id)) return; // this answer is older
  if (job.state === "done") {
    rows.delete(job.id);
    addPictures(job);
    if (!row) return;
    row.job = job;
    row.remove();
    say(`Done: ${job.request.prompt}`);
  } else if (row) row.update(job);
  else if (isShown(job)) new Row({ ...readRecipe(job, job.request.seeds[0]), n: job.request.seeds.length }).update(job);
  followSome();
}

// A job that the page did not know of: one from before a reload, or from another tab.
function isShown(job) {
  if (dismissed.has(job.id)) return false;
  if (LIVE.includes(job.state)) return ![...document.querySelectorAll('.row[data-state="sending"]')].length;
  return job.state === "failed" && Date.now() / 1000 - job.ended_at < FAILURES_SHOWN_S;
}

function listLive() {
  return [...rows.values()].filter((row) => LIVE.includes(row.state));
}

function followSome() {
  const live = listLive();
  let room = MOST_STREAMS - live.filter((row) => row.following).length;
  const order = (row) => (row.job.state === "queued" ? 1e12 : 0) + row.job.created_at;
  for (const row of live.filter((one) => !one.following).sort((a, b) => order(a) - order(b))) {
    if (room-- > 0) follow(row);
  }
}

// Listen to a job until it ends, and again if the connection breaks.
async function follow(row) {
  row.following = true;
  for (let pause = 500; LIVE.includes(row.state); pause = Math.min(8000, 2 * pause)) {
    try {
      const response = await request(`/v1/jobs/${row.job.id}/events`);
      for await (const [kind, told] of readEvents(response)) {
        pause = 500;
        if (kind === "step") row.step(told);
        else if (kind === "preview") row.preview(told);
        else if (kind === "state" && row.state !== "gone") take(told, row);
      }
    } catch (error) {
      if (error.status === 404) row.fail(error.message);
    }
    if (LIVE.includes(row.state)) await sleep(pause);
  }
  row.following = false;
  followSome();
  look();
}

// The gallery

function addPictures(job) {
  if (done.has(job.id)) return;
  done.set(job.id, job);
  job.images.forEach((image, place) => {
    const one = { job, image, place };
    const { prompt } = job.request;
    const shown = h("img", { src: image.url, alt: prompt, title: prompt, loading: "lazy", decoding: "async", width: image.width, height: image.height });
    const button = h("button", { class: "tile", type: "button", onclick: () => open(one) }, shown);
    one.element = h("li", { "data-seed": image.seed }, button);
    pictures.set(`${job.id}/${place}`, one);
  });
  arrange();
}

function listPictures() {
  return [...pictures.values()].sort((a, b) => b.job.created_at - a.job.created_at || a.place - b.place);
}

function arrange() {
  const gallery = $("gallery");
  listPictures().forEach((one, place) => {
    if (gallery.children[place] !== one.element) gallery.insertBefore(one.element, gallery.children[place] ?? null);
  });
  showEmpty();
}

function forget(id) {
  deleted.add(id);
  done.delete(id);
  for (const one of [...pictures.values()].filter((picture) => picture.job.id === id)) {
    one.element.remove();
    pictures.delete(`${id}/${one.place}`);
  }
  showEmpty();
}

let loaded = false, listed = PAGE;

function showEmpty() {
  $("empty").hidden = !loaded || pictures.size > 0 || $("rows").childElementCount > 0;
}

// The newest jobs; those among them that are no longer there were deleted elsewhere.
async function refresh(most) {
  const before = [...done.values()];
  const { data } = await call(`/v1/jobs?limit=${most}`);
  const there = new Set(data.map((job) => job.id));
  const oldest = data.length < most ? 0 : data[data.length - 1].created_at;
  for (const job of before) if (job.created_at >= oldest && !there.has(job.id)) forget(job.id);
  for (const job of data.reverse()) take(job);
  if (most >= listed) $("older").hidden = data.length < most || most >= MOST_LISTED;
  loaded = true;
  showEmpty();
}

// One picture, large

let shown = null;

function open(one) {
  shown = one;
  const { job, image, place } = one;
  const large = $("large");
  large.src = image.url;
  large.alt = job.request.prompt;
  large.width = image.width;
  large.height = image.height;
  large.style.maxWidth = `${Math.max(image.width, Math.min(4 * image.width, 768))}px`; // a small one is shown larger, within reason
  $("viewer-prompt").textContent = job.request.prompt;
  $("facts").replaceChildren(...listFacts(one).flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, String(value))]));
  $("download").href = image.url;
  $("download").download = nameFile(one);
  const isEdit = job.request.task !== "generate"; // the picture that it began with is not kept
  $("again").hidden = $("vary").hidden = isEdit;
  askDelete(false);
  $("viewer-says").textContent = "";
  const all = listPictures(), at = all.indexOf(one);
  $("place").textContent = `${at + 1} of ${all.length}`;
  $("newer").disabled = at <= 0;
  $("next").disabled = at < 0 || at >= all.length - 1;
  if (!$("viewer").open) {
    $("viewer").showModal();
    $("viewer-prompt").focus();
  } else if (!$("viewer").contains(document.activeElement) || document.activeElement.disabled) $("viewer-prompt").focus();
}

function listFacts({ job, image }) {
  const asked = job.request, model = models.get(asked.model);
  const own = "the model’s own";
  return [
    ["Not", asked.negative_prompt],
    ["Seed", image.seed],
    ["Size", `${image.width} × ${image.height}`],
    ["Steps", asked.num_inference_steps ?? model?.num_inference_steps ?? own],
    ["Guidance", asked.guidance_scale ?? model?.guidance_scale ?? own],
    ["Strength", asked.strength],
    ["LoRA", asked.lora && `${asked.lora} × ${asked.lora_scale}`],
    ["Model", asked.model],
    ["Took", `${image.seconds.toFixed(image.seconds < 10 ? 1 : 0)} s`],
    ["Made", new Date(1000 * job.ended_at).toLocaleString()],
  ].filter(([, value]) => value !== null && value !== undefined && value !== "");
}

function nameFile({ job, image }) {
  const words = job.request.prompt.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60).replace(/^-+|-+$/g, "");
  return `${words || "picture"}-${image.seed}.${job.request.output_format.replace("jpeg", "jpg")}`;
}

// The recipe of a picture, as a request for one.
function readRecipe({ request: asked }, seed) {
  const { prompt, negative_prompt, model, num_inference_steps, guidance_scale, lora, output_format } = asked;
  const recipe = { prompt, negative_prompt, model, num_inference_steps, guidance_scale, lora, output_format, seed };
  recipe.size = `${asked.width}x${asked.height}`;
  recipe.lora_scale = lora ? asked.lora_scale : null;
  return Object.fromEntries(Object.entries(recipe).filter(([, value]) => value !== null && value !== undefined));
}

function turn(by) {
  const all = listPictures(), next = all[all.indexOf(shown) + by];
  if (next) open(next);
}

function askDelete(sure) {
  const count = shown.job.images.length;
  $("delete").dataset.sure = sure ? "yes" : "";
  $("delete").textContent = sure ? (count > 1 ? `Really delete all ${count} of this request` : "Really delete") : "Delete";
}

async function deleteShown() {
  if (!$("delete").dataset.sure) return askDelete(true);
  const { job } = shown, all = listPictures(), at = all.indexOf(shown);
  const next = all.slice(at).find((one) => one.job !== job) ?? all.slice(0, at).reverse().find((one) => one.job !== job);
  try {
    await call(`/v1/jobs/${job.id}`, { method: "DELETE" });
  } catch (error) {
    if (error.status !== 404) return void ($("viewer-says").textContent = error.message);
  }
  forget(job.id);
  say("Deleted");
  if (next) open(next);
  else $("viewer").close();
}

function reuse({ job, image }) {
  const asked = job.request;
  if (models.has(asked.model)) $("model").value = asked.model;
  showModel();
  $("prompt").value = asked.prompt;
  $("negative").value = asked.negative_prompt ?? "";
  $("more").open ||= Boolean(asked.negative_prompt || asked.lora);
  setSize(image.width, image.height);
  if (asked.num_inference_steps !== null) $("steps").value = asked.num_inference_steps;
  if (asked.guidance_scale !== null) $("guidance").value = asked.guidance_scale;
  $("lora").value = asked.lora ?? "";
  $("lora-scale").value = asked.lora_scale ?? 1;
}

// The form

function currentModel() {
  return models.get($("model").value);
}

// What the chosen model takes, and its defaults.
function showModel() {
  const model = currentModel();
  if (!model) return;
  const sizes = model.sizes.map((size) => h("option", { value: size }, size.replace("x", " × ")));
  $("size").replaceChildren(...sizes, ...(model.other_sizes ? [h("option", { value: "other" }, "other …")] : []));
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

// The request that the form describes; what is the model's own anyway is not said, since not every model takes it.
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

// How the service is

let planShown = "";

function showStatus(status) {
  const { queued, running, limits } = status;
  const parts = [running ? `${running} being made` : "", queued ? `${plural(queued, "waits", "wait")}` : ""].filter(Boolean);
  $("queue").textContent = status.state === "ready" ? parts.join(", ") || "ready" : status.state;
  notify({
    starting: status.doing === "starting" ? "The service is starting." : `The service is starting: ${status.doing}.`,
    broken: `The service cannot start: ${status.doing}.`,
    ending: "The service is ending, and takes on nothing new.",
  }[status.state] ?? "");
  $("steps").max = limits.max_steps;
  $("count").max = limits.max_n;
  $("prompt").maxLength = $("negative").maxLength = limits.max_prompt;
  showDevices(status);
}

function notify(words) {
  if ($("notice").textContent !== words) $("notice").textContent = words;
  $("notice").hidden = !words;
}

function showDevices({ models: served, version }) {
  const told = JSON.stringify([served, version, models.size]);
  if (told === planShown) return; // what is unfolded stays so
  planShown = told;
  $("device").hidden = !served.length;
  $("device").replaceChildren(...served.map((one) => {
    const facts = models.get(one.name);
    const words = [`${one.name} on ${one.device}`, facts?.dtype].filter(Boolean).join(", ");
    return h("div", {},
      one.virtual ? h("p", { class: "virtual" }, "virtual: nothing here is about hardware") : null,
      h("details", {},
        h("summary", {}, "Plan", h("span", { class: "muted" }, ` of ${words}`)),
        h("pre", { class: "plan", tabindex: 0, role: "region", "aria-label": `Plan of ${one.name}` }, one.plan)));
  }));
  $("version").textContent = version;
}

let looking = false, timer = 0;

// Look how the service is, now and every few seconds; not while nobody looks at the page.
async function look() {
  if (looking || document.hidden) return;
  looking = true;
  clearTimeout(timer);
  let wait = LOOK_WHILE_STARTING_MS;
  try {
    const status = await call("/v1/status");
    const served = status.models.map((model) => model.name).join("\n");
    if (served && served !== [...models.keys()].join("\n")) await loadModels();
    showStatus(status);
    if (!loaded) await refresh(listed);
    else if (status.queued + status.running || listLive().length) await refresh(RECENT);
    if (status.state === "ready") wait = LOOK_MS;
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    $("queue").textContent = "";
    notify(error.status ? `The service says: ${error.message}.` : "The service does not answer; the page goes on trying.");
    wait = LOOK_MS;
  } finally {
    looking = false;
    timer = setTimeout(look, wait);
  }
}

// What people do

function listen() {
  $("make").addEventListener("submit", (event) => {
    event.preventDefault();
    const body = readForm();
    if (!body.prompt) return $("prompt").focus();
    make(body);
  });
  $("make").addEventListener("invalid", (event) => ($("more").open ||= $("more").contains(event.target)), true);
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    $("make").requestSubmit();
  });
  $("model").addEventListener("change", showModel);
  $("size").addEventListener("change", () => {
    showSize();
    if ($("size").value === "other") $("width").focus();
  });
  $("older").addEventListener("click", () => {
    listed = Math.min(MOST_LISTED, listed + PAGE);
    refresh(listed).catch((error) => notify(`${error.message}.`));
  });
  document.addEventListener("visibilitychange", () => {
    loaded &&= document.hidden; // what happened meanwhile is looked up
    look();
  });
}

function listenToViewer() {
  const viewer = $("viewer");
  const leave = (act) => () => {
    const one = shown;
    viewer.close();
    act(one);
  };
  viewer.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    turn(by);
  });
  viewer.addEventListener("click", (event) => event.target === viewer && viewer.close());
  viewer.addEventListener("close", () => {
    shown?.element.querySelector("button").focus();
    shown = null;
  });
  $("close").addEventListener("click", () => viewer.close());
  $("newer").addEventListener("click", () => turn(-1));
  $("next").addEventListener("click", () => turn(1));
  $("again").addEventListener("click", leave((one) => make(readRecipe(one.job, one.image.seed))));
  $("vary").addEventListener("click", leave((one) => make(readRecipe(one.job, null))));
  $("reuse").addEventListener("click", leave((one) => {
    reuse(one);
    shown = null; // the focus is not given back to its picture
    $("prompt").focus();
  }));
  $("delete").addEventListener("click", deleteShown);
  $("delete").addEventListener("blur", () => shown && askDelete(false));
}

listen();
listenToViewer();
if (matchMedia("(min-width: 900px)").matches) $("prompt").focus(); // on a telephone it would open the keyboard
look();
