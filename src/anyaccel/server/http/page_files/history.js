// Finished jobs: the newest result in large, and a tile for each result.
import { call } from "./api.js";
import { $, formatSeconds, h } from "./dom.js";
import { findStill, limitSize, listResults, makeFileName, makeMedia, makeTile } from "./media.js";

export const RECENT = 20;
const PAGE = 100, MAX_LISTED = 1000;
const items = new Map(); // by "job/index"
const jobs = new Map(); // finished jobs, by id
const deleted = new Set();
const actions = { open: null, reuse: null, vary: null, use: null, update: null }; // set by `setActions`
let shown = null; // the result shown in large
export let loaded = false;
let listed = PAGE;

export function setActions(functions) {
  Object.assign(actions, functions);
}

export function isDeleted(id) {
  return deleted.has(id);
}

export function addJob(job) {
  if (jobs.has(job.id)) return;
  jobs.set(job.id, job);
  for (const item of listResults(job)) {
    item.element = makeTile(item, () => actions.open(item));
    items.set(item.id, item);
  }
  sortTiles();
}

// Results, the newest job first.
export function listItems() {
  return [...items.values()].sort((a, b) => b.job.created_at - a.job.created_at || a.index - b.index);
}

function sortTiles() {
  const list = $("gallery");
  // Move only elements in the wrong position: moving the focused element would remove its focus.
  listItems().forEach((item, position) => {
    if (list.children[position] !== item.element) list.insertBefore(item.element, list.children[position] ?? null);
  });
  showResult();
}

export function removeJob(id) {
  deleted.add(id);
  jobs.delete(id);
  for (const item of [...items.values()].filter(({ job }) => job.id === id)) {
    item.element.remove();
    items.delete(item.id);
  }
  showResult();
}

// Show the newest result in large, unless jobs are running: their previews are shown instead.
export function showResult() {
  const hasRows = $("rows").childElementCount > 0, item = listItems()[0];
  $("empty").hidden = !loaded || items.size > 0 || hasRows;
  $("history-title").hidden = !items.size;
  $("result").hidden = hasRows || !item;
  if ($("result").hidden) {
    $("result").querySelectorAll("video, audio").forEach((player) => player.pause());
    return;
  }
  if (shown === item.id) return;
  shown = item.id;
  const { job, result, kind } = item, media = makeMedia(item);
  limitSize(media, item, 4, 768);
  if (media.matches("img")) media.addEventListener("click", () => actions.open(item)); // with the keyboard: "Details"
  const facts = [result.seed !== undefined ? `Seed ${result.seed}` : "", kind === "audio" ? "" : `${result.width} × ${result.height}`,
    result.length_s ? formatSeconds(result.length_s) : "", job.request.num_inference_steps ? `${job.request.num_inference_steps} steps` : "",
    result.seconds ? `generated in ${formatSeconds(result.seconds)}` : ""].filter(Boolean);
  const button = (name, action, title) => h("button", { class: "button", type: "button", title, onclick: () => action(item) }, name);
  $("result").replaceChildren(
    h("div", { class: "stage" }, media),
    h("div", { class: "caption" },
      h("p", { class: "row-prompt", title: job.request.prompt }, job.request.prompt),
      h("p", { class: "muted small" }, facts.join("  ·  ")),
      h("div", { class: "actions" },
        h("a", { class: "button", href: result.url, download: makeFileName(item) }, "Download"),
        job.request.task === "generate" ? button("New seed", actions.vary, "Same settings, new seed") : null,
        kind !== "audio" && findStill(item) ? button("Use as input", actions.use, "Use this result as the input image") : null,
        button("Edit settings", actions.reuse, "Copy the settings into the form"),
        button("Details", actions.open, "Show all settings, or delete the result"))));
}

// Fetch the newest jobs, and remove those that were deleted elsewhere.
export async function refresh(limit = listed) {
  const before = [...jobs.values()];
  const { data, has_more: hasMore } = await call(`/v1/jobs?limit=${limit}`);
  const ids = new Set(data.map((job) => job.id));
  const oldest = hasMore ? data[data.length - 1].created_at : 0;
  for (const job of before) if (job.created_at >= oldest && !ids.has(job.id)) removeJob(job.id);
  loaded = true;
  for (const job of data.reverse()) actions.update(job);
  if (limit >= listed) $("older").hidden = !hasMore || limit >= MAX_LISTED;
  showResult();
}

export function markOutdated() {
  loaded = false;
}

export function showOlder() {
  listed = Math.min(MAX_LISTED, listed + PAGE);
  return refresh(listed);
}
