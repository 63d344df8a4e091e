// Running jobs: a row for each, from sending the request until its results are finished.
import { call, readEvents, request, toJson } from "./api.js";
import { $, announce, formatSeconds, h, plural, sleep } from "./dom.js";
import { readSettings } from "./form.js";
import { addJob, isDeleted } from "./history.js";
import { models } from "./models.js";
import { ProgressTile } from "./progress_tile.js";

export const LIVE = ["sending", "queued", "running", "cancelling"];
const PREVIEWS = 3;
const MAX_STREAMS = 3; // browsers open at most six HTTP/1.1 connections per host
const FAILURES_SHOWN_S = 600;
const MIN_ESTIMATE_S = 3;

const rows = new Map(); // by job id
const dismissed = new Set();
const sentInputs = new Map(); // inputs of the jobs of this page, by job id: the service does not return them

export function findInputs(id) {
  return sentInputs.get(id) ?? null;
}

class Row {
  constructor(body) {
    const count = body.n ?? 1;
    this.body = body;
    this.job = null;
    this.state = "sending";
    this.following = this.cancelRequested = false;
    this.tiles = Array.from({ length: count }, (_, index) => new ProgressTile(body, index, count));
    this.status = h("p", { class: "row-state" }, "sending …");
    this.actions = h("div", { class: "row-actions" });
    this.element = h("li", { class: "row" },
      h("ol", { class: count > 1 ? "frames" : "frames single" }, this.tiles.map((tile) => tile.element)),
      h("div", { class: "row-head" }, h("p", { class: "row-prompt", title: body.prompt }, body.prompt), h("div", { class: "row-line" }, this.status, this.actions)));
    this.setActions(["Cancel", () => this.cancel()]);
    this.show("sending", "sending …");
    $("rows").prepend(this.element);
    reportChange();
  }

  show(state, text) {
    this.state = this.element.dataset.state = state;
    this.status.textContent = text;
  }

  setActions(...actions) {
    const hadFocus = this.actions.contains(document.activeElement);
    this.actions.replaceChildren(...actions.map(([name, onclick]) => h("button", { class: "button", type: "button", onclick }, name)));
    if (hadFocus) this.actions.firstChild?.focus();
  }

  // Apply a job object from the service.
  update(job) {
    if (job.attempts < this.job?.attempts) return; // an outdated response
    this.job = job;
    rows.set(job.id, this);
    if (this.body.inputs) sentInputs.set(job.id, this.body.inputs);
    if (this.state === "cancelling" && job.state === "running") return; // response from before the cancellation
    if (job.state === "queued") this.show("queued", job.waiting ? `queued, ${plural(job.waiting, "job", "jobs")} ahead` : "queued, next in line");
    else if (job.state === "running" && (this.state !== "running" || !this.following)) {
      if (this.state !== "running") announce(`Generating: ${this.body.prompt}`);
      this.show("running", job.progress ? `${Math.round(100 * job.progress)}%` : "starting");
      this.startedAt = null;
      for (const tile of this.tiles) tile.begin(job.progress);
    } else if (job.state === "cancelling") this.show("cancelling", "stopping at the next step");
    else if (job.state === "failed") this.fail(job.error?.message ?? "the job failed");
    else if (job.state === "cancelled") this.end("cancelled", "cancelled");
  }

  step({ index, done, total }) {
    this.tiles[index]?.step(done, total);
    if (this.state === "running") this.status.textContent = this.progressText();
  }

  save({ done, total }) {
    if (this.state === "running") this.status.textContent = `encoding frame ${done} of ${total}`;
  }

  progressText() {
    const count = this.tiles.length;
    const started = this.tiles.filter((tile) => tile.total);
    const [done, total] = started.reduce(([a, b], tile) => [a + tile.done, b + tile.total], [0, 0]);
    if (started.length && done === total && started.length === count) return "decoding";
    // Results that have not started yet count with the average number of steps.
    const fraction = done / ((total / started.length) * count);
    const text = count === 1 ? `step ${done} of ${total}` : `${plural(count, "image", "images")}, ${Math.round(100 * fraction)}%`;
    return [text, this.estimate(fraction)].filter(Boolean).join(", ");
  }

  // Return the remaining time, measured since the first step: the time before it is spent on other work.
  estimate(fraction) {
    const now = performance.now();
    if (!this.startedAt) [this.startedAt, this.startFraction] = [now, fraction];
    const gained = fraction - this.startFraction;
    const left = gained > 0 ? (((now - this.startedAt) / 1000) * (1 - fraction)) / gained : 0;
    return left > MIN_ESTIMATE_S ? `about ${formatSeconds(Math.ceil(left))} left` : "";
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
    const retry = () => {
      this.remove();
      generate(this.body);
    };
    // The inputs of a request from before a reload are not known.
    const isComplete = !this.job || this.job.request.task === "generate" || this.body.inputs;
    this.setActions(...(isComplete ? [["Try again", retry]] : []), ["Dismiss", () => this.remove()]);
    announce(`${state}: ${message}`);
    reportChange();
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
    reportChange();
  }
}

function reportChange() {
  document.dispatchEvent(new Event("rowschange"));
}

// Submit a job. Retries after the time in the Retry-After header if the queue is full or the service is starting.
export async function generate(body) {
  const seed = body.seed ?? String(crypto.getRandomValues(new Uint32Array(1))[0]);
  const kind = (models.get(body.model) ?? models.values().next().value)?.kind ?? "image";
  const payload = { ...body, seed, ...(kind === "image" ? { partial_images: PREVIEWS } : {}) };
  const row = new Row(body);
  row.element.scrollIntoView({ block: "nearest" }); // on a phone, it may be below the form
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
      if (error.retryS === null || error.retryS === undefined) return row.fail(error.message);
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

// Show a job object: finished jobs in the history, others in their row.
export function updateJob(job, row = rows.get(job.id)) {
  if (isDeleted(job.id)) return; // an outdated response
  if (job.state === "done") {
    rows.delete(job.id);
    addJob(job);
    if (!row) return;
    row.job = job;
    if (row.body.inputs) sentInputs.set(job.id, row.body.inputs);
    row.remove();
    announce(`Done: ${job.request.prompt}`);
  } else if (row) row.update(job);
  else if (isShown(job)) new Row(readSettings(job, job.request.seeds[0])).update(job);
  followSome();
}

// Return whether to add a row for a job from another tab or from before a reload.
function isShown(job) {
  if (dismissed.has(job.id)) return false;
  // A row in state "sending" has no job id yet and may be this job.
  if (LIVE.includes(job.state)) return !document.querySelector('.row[data-state="sending"]');
  return job.state === "failed" && Date.now() / 1000 - job.ended_at < FAILURES_SHOWN_S;
}

export function listLive() {
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
        else if (kind === "save") row.save(data);
        else if (kind === "preview" || kind === "made") row.preview(data);
        else if (kind === "state" && row.state !== "removed") updateJob(data, row);
      }
    } catch (error) {
      if (error.status === 404) row.fail(error.message);
    }
    if (LIVE.includes(row.state)) await sleep(delay);
  }
  row.following = false;
  followSome();
  document.dispatchEvent(new Event("jobend"));
}
