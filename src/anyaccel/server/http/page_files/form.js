// The form: the options of the selected model, and the conversion from and to the body of a request.
import { readArguments, setArguments, showArguments } from "./arguments.js";
import { $, h } from "./dom.js";
import { listChosen, listNames, readInputs, setInputs, showInputs } from "./inputs.js";
import { openMask } from "./mask.js";
import { currentModel, findTask, limits, matchSize, models } from "./models.js";

const FORMATS = { image: ["png", "jpeg", "webp"], video: ["mp4", "webm", "gif", "webp"], audio: ["wav", "flac"] };
const QUALITIES = { exact: ["high", "exact"], fast: ["medium", "fast"], draft: ["low", "draft"] };
const HINTS = { image: "Describe the image", video: "Describe the video", audio: "Describe the audio" };

function currentTask() {
  const model = currentModel(), task = findTask(listNames());
  return model && !model.tasks.includes(task) && task === "generate" ? model.tasks[0] : task;
}

// Show the options and defaults of the selected model.
export function showModel() {
  const model = currentModel();
  if (!model) return;
  $("prompt").placeholder = HINTS[model.kind];
  fillSizes(model);
  $("size-field").hidden = model.kind === "audio";
  $("count-field").hidden = model.kind !== "image";
  const setsLength = model.video?.sets_frames || model.audio?.sets_seconds;
  $("seconds-field").hidden = !setsLength;
  $("seconds").value = "";
  $("seconds").placeholder = model.video ? `${Math.round((100 * model.video.frames) / model.video.fps) / 100}` : "auto";
  $("format").replaceChildren(...FORMATS[model.kind].map((name) => h("option", { value: name }, name)));
  const levels = model.speeds.length > 1 ? model.speeds : [];
  $("quality").replaceChildren(...levels.map((speed) => h("option", { value: QUALITIES[speed][0] }, QUALITIES[speed][1])));
  $("quality-field").hidden = !levels.length;
  showLoras();
  showTask();
}

// Offer the LoRAs of the selected model, and keep the selected one.
export function showLoras() {
  const { loras } = currentModel(), selected = $("lora").value;
  $("lora").replaceChildren(h("option", { value: "" }, "none"), ...loras.map((name) => h("option", { value: name }, name)));
  if (loras.includes(selected)) $("lora").value = selected;
  $("lora-field").hidden = !loras.length;
  showLoraScale();
}

function showLoraScale() {
  $("lora-scale-field").hidden = $("lora-field").hidden || !$("lora").value;
}

// Show the options of the task, which depends on the inputs.
export function showTask() {
  const model = currentModel();
  if (!model) return;
  showInputs(openMask);
  const task = currentTask(), parameters = model.parameters[task] ?? [], defaults = model.defaults[task] ?? model;
  $("negative-field").hidden = !parameters.includes("negative_prompt");
  for (const [id, name] of [["steps", "num_inference_steps"], ["guidance", "guidance_scale"], ["strength", "strength"]]) {
    $(`${id}-field`).hidden = !parameters.includes(name);
    const text = String(defaults[name] ?? "");
    if ($(id).value === "" || $(id).value === $(id).dataset.default) $(id).value = text;
    $(id).dataset.default = text;
  }
  showLoraScale();
  showArguments(model, task);
  showMatch(model);
  showSize();
}

function fillSizes(model) {
  const sizes = model.sizes.map((size) => h("option", { value: size }, size.replace("x", " × ")));
  $("size").replaceChildren(...sizes, ...(model.other_sizes ? [h("option", { value: "other" }, "custom …")] : []));
  const [width, height] = model.sizes[0].split("x");
  for (const [id, side] of [["width", width], ["height", height]]) {
    $(id).value = side;
    $(id).step = $(id).min = model.multiple;
  }
}

// Offer the shape of the input image, and select it if an image was added.
function showMatch(model) {
  const [image] = listNames().includes("image") ? listChosen("image") : [];
  let option = $("size").querySelector("[data-match]");
  if (!image || !model.other_sizes) return void option?.remove();
  const size = matchSize(model, image), isNew = !option;
  if (isNew) $("size").prepend((option = h("option", { "data-match": "yes" })));
  if (option.value !== size || isNew) {
    option.value = size;
    option.textContent = `${size.replace("x", " × ")} (like the input)`;
    if (isNew) option.selected = true;
  }
}

export function showSize() {
  const isOther = $("size").value === "other" && !$("size-field").hidden;
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

const isShown = (id) => !$(`${id}-field`).hidden;

// Return the form as a request body, without values equal to the model's default: not every model accepts them.
export async function readForm() {
  const model = currentModel();
  const body = { prompt: $("prompt").value.trim() };
  if (!model) return body;
  body.model = model.id;
  if (isShown("count")) body.n = Number($("count").value);
  const size = $("size").value;
  if (size && isShown("size")) body.size = size === "other" ? `${$("width").value}x${$("height").value}` : size;
  for (const [id, name] of [["steps", "num_inference_steps"], ["guidance", "guidance_scale"], ["strength", "strength"], ["seconds", "seconds"]]) {
    const { value, dataset } = $(id);
    if (isShown(id) && value !== "" && value !== dataset.default) body[name] = Number(value);
  }
  if (isShown("negative") && $("negative").value.trim()) body.negative_prompt = $("negative").value.trim();
  if ($("seed").value.trim()) body.seed = $("seed").value.trim();
  if (isShown("lora") && $("lora").value) [body.lora, body.lora_scale] = [$("lora").value, Number($("lora-scale").value || 1)];
  if (isShown("quality")) body.quality = $("quality").value;
  if ($("format").selectedIndex > 0) body.output_format = $("format").value;
  const inputs = await readInputs();
  return { ...body, ...readArguments(), ...(inputs ? { inputs } : {}) };
}

// Return the settings of a job as the body of a new request.
export function readSettings({ request: settings }, seed, inputs = null, count = settings.seeds.length) {
  const { prompt, negative_prompt, model, num_inference_steps, guidance_scale, lora, output_format, num_frames, fps } = settings;
  const body = { prompt, negative_prompt, model, num_inference_steps, guidance_scale, lora, output_format, seed, inputs };
  body.strength = settings.task === "generate" ? null : settings.strength;
  if (settings.kind === "video") Object.assign(body, { num_frames, fps });
  if (settings.kind === "audio") body.seconds = models.get(settings.model)?.audio?.sets_seconds ? settings.seconds : null;
  else body.size = `${settings.width}x${settings.height}`;
  if ((settings.kind ?? "image") === "image" && count > 1) body.n = count;
  body.lora_scale = lora ? settings.lora_scale : null;
  body.quality = QUALITIES[settings.speed]?.[0];
  Object.assign(body, settings.arguments);
  return Object.fromEntries(Object.entries(body).filter(([, value]) => value !== null && value !== undefined));
}

// Copy the settings of a job into the form, without its seed.
export async function fillForm(settings, inputs) {
  if (models.has(settings.model)) $("model").value = settings.model;
  showModel();
  await setInputs(inputs);
  $("prompt").value = settings.prompt;
  $("negative").value = settings.negative_prompt ?? "";
  setArguments(settings.arguments);
  $("more").open ||= Boolean(settings.negative_prompt || settings.lora || Object.keys(settings.arguments ?? {}).length);
  if (settings.kind !== "audio") setSize(settings.width, settings.height);
  if (settings.num_inference_steps !== null) $("steps").value = settings.num_inference_steps;
  if (settings.guidance_scale !== null) $("guidance").value = settings.guidance_scale;
  if (settings.strength) $("strength").value = settings.strength;
  if (settings.seconds && isShown("seconds")) $("seconds").value = Math.round(1000 * settings.seconds) / 1000;
  $("format").value = settings.output_format;
  $("lora").value = settings.lora ?? "";
  $("lora-scale").value = settings.lora_scale ?? 1;
  showTask();
}

export function showLimits() {
  $("steps").max = limits.max_steps;
  $("count").max = limits.max_n;
  $("prompt").maxLength = $("negative").maxLength = limits.max_prompt;
}
