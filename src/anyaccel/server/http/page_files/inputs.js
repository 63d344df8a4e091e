// Input images: dropped, pasted or chosen files, reduced to the limits of the service.
import { $, announce, h, icon } from "./dom.js";
import { currentModel, limits, listInputs } from "./models.js";

const ACCEPTED = ["image/png", "image/jpeg", "image/webp"];
const MAX_BYTES = 4 * 2 ** 20;
export const RESULT_TYPE = "application/x-anyaccel-result"; // URL of a result that is dragged to an input
const TITLES = {
  image: { image: "Input image", video: "First frame", audio: "Input image" },
  mask_image: "Mask (white where the image changes)",
  control_image: "Control image",
  ip_adapter_image: "IP-Adapter image",
};
const REMOVE = "M4 4l8 8M12 4l-8 8";

const chosen = new Map(); // input name → list of { blob, url, width, height, name }
let onChange = () => {};

export function listChosen(name) {
  return chosen.get(name) ?? [];
}

// Return the names of the inputs that have an image.
export function listNames() {
  const accepted = listInputs(currentModel());
  return [...chosen.keys()].filter((name) => listChosen(name).length && accepted.includes(name));
}

// Return the images as data URLs, by input name, or null if there are none.
export async function readInputs() {
  const names = listNames().filter((name) => name !== "mask_image" || listChosen("image").length);
  const urls = await Promise.all(names.map((name) => Promise.all(listChosen(name).map(({ blob }) => toDataUrl(blob)))));
  return names.length ? Object.fromEntries(names.map((name, index) => [name, urls[index]])) : null;
}

function toDataUrl(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}

// Replace all inputs by those of an earlier request, which are data URLs by input name.
export async function setInputs(inputs) {
  for (const name of [...chosen.keys()]) clearInput(name);
  for (const [name, urls] of Object.entries(inputs ?? {})) {
    for (const url of urls) await addImage(name, await (await fetch(url)).blob(), name);
  }
  onChange();
}

// Use a result of the service as an input.
export async function addResult(url, name = "image") {
  try {
    await addFiles(name, [await (await fetch(url)).blob()]);
  } catch (error) {
    showError(`cannot read the image: ${error.message}`);
  }
}

export async function addFiles(name, files) {
  showError("");
  for (const file of files) {
    try {
      await addImage(name, file, file.name ?? "result");
    } catch (error) {
      showError(error.message);
    }
  }
  onChange();
}

async function addImage(name, blob, title) {
  const image = await readImage(name, blob, title);
  const takesMany = name === "image" && currentModel()?.many_images;
  if (!takesMany) clearInput(name);
  if (name === "image" && !takesMany) clearInput("mask_image"); // it belongs to the image before
  chosen.set(name, [...listChosen(name), image]);
  announce(`Added ${title}`);
}

// Return an image that the service accepts: a smaller copy if it is too large or in another format.
async function readImage(name, blob, title) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(blob);
  } catch (error) {
    throw new Error(`${title || "the file"} is not an image that this browser can read; use PNG, JPEG or WebP`);
  }
  let { width, height } = bitmap;
  const maxPixels = limits.max_pixels ?? Infinity;
  if (width * height > maxPixels || blob.size > MAX_BYTES || !ACCEPTED.includes(blob.type)) {
    const scale = Math.min(1, Math.sqrt(Math.min(maxPixels, 2 ** 22) / (width * height)));
    const canvas = h("canvas", { width: Math.max(1, Math.floor(width * scale)), height: Math.max(1, Math.floor(height * scale)) });
    canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
    blob = await new Promise((resolve) => canvas.toBlob(resolve, name === "mask_image" ? "image/png" : "image/jpeg", 0.95));
    ({ width, height } = canvas);
  }
  bitmap.close();
  return { blob, url: URL.createObjectURL(blob), width, height, name: title };
}

function clearInput(name) {
  for (const { url } of listChosen(name)) URL.revokeObjectURL(url);
  chosen.delete(name);
}

function showError(message) {
  $("input-error").textContent = message;
}

// Show an area for each input of the selected model.
export function showInputs(paintMask) {
  const model = currentModel();
  const names = listInputs(model).filter((name) => name !== "mask_image" || listChosen("image").length);
  $("inputs").replaceChildren(...names.map((name) => makeZone(name, model, paintMask)));
}

function requires(model, name) {
  return name === "image" ? !model.tasks.includes("generate") : Boolean(model.required_inputs?.generate?.includes(name));
}

// Return the input for an image that is dropped or pasted elsewhere: one that the model requires, or the input image.
function findDefault() {
  const model = currentModel();
  return listInputs(model).find((name) => requires(model, name) && !listChosen(name).length) ?? "image";
}

function makeZone(name, model, paintMask) {
  const title = TITLES[name]?.[model.kind] ?? TITLES[name] ?? name;
  const images = listChosen(name);
  const isRequired = requires(model, name);
  const takesMany = name === "image" && model.many_images;
  const file = h("input", { type: "file", accept: "image/*", class: "hidden-text", multiple: takesMany, "aria-label": `Choose: ${title}`,
    onchange: (event) => addFiles(name, event.target.files) });
  const prompt = images.length ? (takesMany ? "Add" : "Replace") : "Drop, paste or choose an image";
  const actions = [h("label", { class: images.length ? "link" : "drop" }, file, prompt)];
  if (name === "mask_image") actions.push(h("button", { class: "link", type: "button", onclick: paintMask }, images.length ? "Paint again" : "Paint the area"));
  const thumbs = images.map((image, index) => makeThumb(name, image, index));
  return h("div", { class: "zone", "data-input": name, role: "group", "aria-label": title },
    h("span", { class: "label" }, title, isRequired ? "" : h("span", { class: "optional" }, " optional")),
    h("div", { class: "zone-body" }, thumbs, actions));
}

function makeThumb(name, image, index) {
  const remove = () => {
    chosen.set(name, listChosen(name).filter((_, position) => position !== index));
    URL.revokeObjectURL(image.url);
    if (name === "image" && !listChosen("image").length) clearInput("mask_image");
    onChange();
    $("inputs").querySelector(`[data-input="${name}"] input`)?.focus();
  };
  return h("span", { class: "thumb" },
    h("img", { src: image.url, alt: image.name, title: `${image.width} × ${image.height}` }),
    h("button", { type: "button", class: "remove", "aria-label": `Remove ${image.name}`, onclick: remove }, icon(REMOVE)));
}

// Accept images that are dropped anywhere on the page, or pasted.
export function addInputListeners(changed) {
  onChange = changed;
  const canDrop = ({ dataTransfer }) => [...dataTransfer.types].some((type) => type === "Files" || type === RESULT_TYPE);
  const findName = (target) => target?.closest?.("[data-input]")?.dataset.input;
  let depth = 0; // `dragenter` and `dragleave` are sent for each element
  const mark = (change) => {
    depth = change === null ? 0 : depth + change;
    document.body.classList.toggle("dragging", depth > 0);
  };
  document.addEventListener("dragenter", (event) => canDrop(event) && mark(1));
  document.addEventListener("dragleave", (event) => canDrop(event) && mark(-1));
  document.addEventListener("dragover", (event) => canDrop(event) && event.preventDefault());
  document.addEventListener("drop", (event) => {
    if (!canDrop(event)) return;
    event.preventDefault();
    mark(null);
    const { dataTransfer } = event, name = findName(event.target) ?? findDefault();
    const result = dataTransfer.getData(RESULT_TYPE);
    acceptDrop(name, result ? null : [...dataTransfer.files], result);
  });
  document.addEventListener("paste", (event) => {
    const files = [...event.clipboardData.files].filter((file) => file.type.startsWith("image/"));
    if (!files.length || document.querySelector("dialog[open]")) return;
    event.preventDefault();
    const hovered = findName(document.querySelector("[data-input]:hover"));
    acceptDrop(hovered ?? findName(document.activeElement) ?? findDefault(), files);
  });
}

function acceptDrop(name, files, result) {
  if (!listInputs(currentModel()).includes(name)) return showError(`${currentModel()?.id ?? "the model"} accepts no input image`);
  return files ? addFiles(name, files) : addResult(result, name);
}
