// Elements that show a finished image, video or audio.
import { formatSeconds, h, icon } from "./dom.js";
import { RESULT_TYPE } from "./inputs.js";

const PLAY = "M5 3.5v9l7.5-4.5z";
const NOTE = "M6 12.5a2 2 0 1 1-1-1.7V3l7-1v8.5a2 2 0 1 1-1-1.7V5L6 5.8z";
const canMove = () => matchMedia("(prefers-reduced-motion: no-preference)").matches;

// Return the results of a finished job as items with the job, the result and its position.
export function listResults(job) {
  const kind = job.request.kind ?? "image";
  return (job[`${kind}s`] ?? []).map((result, index) => ({ job, result, index, kind, id: `${job.id}/${index}` }));
}

export function isPlayable({ kind, job }) {
  return kind !== "image" && !["gif", "webp"].includes(job.request.output_format); // browsers show these as images
}

// Return the URL of a still image of the result, or null.
export function findStill({ kind, result }) {
  return kind === "image" ? result.url : result.thumbnail_url ?? result.waveform_url ?? null;
}

// Return the large element of a result: an image, or a player.
export function makeMedia(item) {
  const { job, result, kind } = item, alt = job.request.prompt;
  if (!isPlayable(item)) return h("img", { class: "media", src: result.url, alt, width: result.width, height: result.height, draggable: "true", ondragstart: (event) => drag(event, item) });
  if (kind === "audio") {
    return h("div", { class: "audio" },
      result.waveform_url ? h("img", { class: "waveform", src: result.waveform_url, alt: "" }) : null,
      h("audio", { class: "media", src: result.url, controls: true, preload: "metadata", "aria-label": alt, onerror: reportUnplayable }));
  }
  const video = h("video", { class: "media", src: result.url, poster: result.thumbnail_url, controls: true, loop: true, playsinline: true, preload: "auto",
    width: result.width, height: result.height, "aria-label": alt, onerror: reportUnplayable });
  video.muted = video.autoplay = !result.with_audio && canMove();
  return video;
}

// Browsers differ in the codecs and sampling rates that they play.
function reportUnplayable({ target }) {
  target.after(h("p", { class: "muted small" }, "This browser cannot play the file. Download it instead."));
}

// Enlarge small results, up to `factor` times.
export function limitSize(media, { result, kind }, factor, maximum) {
  if (kind !== "audio") media.style.maxWidth = `${Math.max(result.width, Math.min(factor * result.width, maximum))}px`;
}

// Return a tile of the history.
export function makeTile(item, onclick) {
  const { job, result, kind } = item, still = findStill(item), { prompt } = job.request;
  const image = still
    ? h("img", { src: still, alt: prompt, title: prompt, loading: "lazy", decoding: "async", width: result.width || null, height: result.height || null, draggable: "true", ondragstart: (event) => drag(event, item) })
    : h("span", { class: "tile-text" }, prompt);
  const length = result.length_s ? formatSeconds(result.length_s) : "";
  const badge = kind === "image" ? null : h("span", { class: "badge" }, icon(kind === "audio" ? NOTE : PLAY), length);
  return h("li", { "data-seed": result.seed, "data-kind": kind }, h("button", { class: `tile ${kind}`, type: "button", onclick }, image, badge));
}

function drag(event, item) {
  const still = item.kind === "audio" ? null : findStill(item);
  if (still) event.dataTransfer.setData(RESULT_TYPE, new URL(still, location.href).href);
}

export function makeFileName({ job, result, kind }) {
  const slug = job.request.prompt.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60).replace(/^-+|-+$/g, "");
  return `${slug || kind}-${result.seed}.${job.request.output_format.replace("jpeg", "jpg")}`;
}
