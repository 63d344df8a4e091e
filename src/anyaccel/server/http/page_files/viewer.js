// Dialog that shows one result with its settings and actions.
import { call } from "./api.js";
import { $, announce, formatSeconds, h } from "./dom.js";
import { listItems, removeJob } from "./history.js";
import { findStill, limitSize, makeFileName, makeMedia } from "./media.js";
import { models } from "./models.js";
import { findInputs } from "./running.js";

let current = null; // the item in the viewer

export function openViewer(item) {
  current = item;
  const { job, result, kind } = item, media = makeMedia(item);
  limitSize(media, item, 4, 768);
  $("large").replaceChildren(media);
  $("viewer-prompt").textContent = job.request.prompt;
  $("facts").replaceChildren(...listFacts(item).flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, String(value))]));
  $("download").href = result.url;
  $("download").download = makeFileName(item);
  // The service does not return the input images, so they are known only if this page has sent them.
  $("again").hidden = $("vary").hidden = job.request.task !== "generate" && !findInputs(job.id);
  $("use").hidden = kind === "audio" || !findStill(item);
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

function listFacts({ job, result, kind }) {
  const settings = job.request, defaults = models.get(settings.model)?.defaults[settings.task] ?? {};
  const unset = "model default";
  return [
    ["Negative prompt", settings.negative_prompt],
    ["Seed", result.seed],
    ["Size", kind === "audio" ? null : `${result.width} × ${result.height}`],
    ["Length", result.length_s && formatSeconds(result.length_s)],
    ["Frames", result.num_frames && `${result.num_frames}, ${result.fps} per second`],
    ["Audio", result.sampling_rate && `${result.sampling_rate} Hz, ${result.channels === 1 ? "mono" : `${result.channels} channels`}`],
    ["Steps", settings.num_inference_steps ?? defaults.num_inference_steps ?? unset],
    ["Guidance", settings.guidance_scale ?? defaults.guidance_scale ?? unset],
    ["Strength", settings.task === "generate" ? null : settings.strength],
    ["LoRA", settings.lora && `${settings.lora} × ${settings.lora_scale}`],
    ["Model", settings.model],
    ["Speed", settings.speed],
    ...Object.entries(settings.arguments ?? {}).map(([name, value]) => [name, JSON.stringify(value)]),
    ["Format", settings.output_format],
    ["Time", formatSeconds(result.seconds)],
    ["Created", new Date(1000 * job.ended_at).toLocaleString()],
  ].filter(([, value]) => value !== null && value !== undefined && value !== "");
}

function showNeighbor(offset) {
  const items = listItems(), next = items[items.indexOf(current) + offset];
  if (next) openViewer(next);
}

// Switch the delete button between "Delete" and its confirmation.
function confirmDelete(armed) {
  const { job, kind } = current, count = job.request.seeds.length;
  $("delete").dataset.armed = armed ? "yes" : "";
  const names = { image: "this image", video: "this video", audio: "this audio" };
  $("delete").textContent = armed ? (count > 1 ? `Delete all ${count} images of this request?` : `Delete ${names[kind]}?`) : "Delete";
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

// `actions` maps the ids of buttons to functions that are called with the item after the viewer has closed.
export function addViewerListeners(actions) {
  const viewer = $("viewer");
  viewer.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
    const offset = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!offset || event.target.matches("video, audio")) return; // players seek with the arrow keys
    event.preventDefault();
    showNeighbor(offset);
  });
  viewer.addEventListener("click", (event) => event.target === viewer && viewer.close());
  viewer.addEventListener("close", () => {
    current?.element.querySelector("button").focus();
    current = null;
    $("large").replaceChildren(); // stops a player
  });
  $("close").addEventListener("click", () => viewer.close());
  $("newer").addEventListener("click", () => showNeighbor(-1));
  $("next").addEventListener("click", () => showNeighbor(1));
  for (const [id, action] of Object.entries(actions)) {
    $(id).addEventListener("click", () => {
      const item = current;
      current = null; // the focus does not go back to the tile
      viewer.close();
      action(item);
    });
  }
  $("delete").addEventListener("click", deleteCurrent);
  $("delete").addEventListener("blur", () => current && confirmDelete(false));
}
