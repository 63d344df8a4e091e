// The served models and the limits of the service.
import { call } from "./api.js";
import { $, h } from "./dom.js";

export const models = new Map(); // by id, the default first
export let limits = {};

export function setLimits(values) {
  limits = values;
}

export function currentModel() {
  return models.get($("model").value);
}

export async function loadModels() {
  const { data } = await call("/v1/models");
  const selected = $("model").value;
  models.clear();
  for (const model of data) models.set(model.id, model);
  const label = ({ id, kind }) => (new Set(data.map((model) => model.kind)).size > 1 ? `${id} (${kind})` : id);
  $("model").replaceChildren(...data.map((model) => h("option", { value: model.id }, label(model))));
  if (models.has(selected)) $("model").value = selected;
  $("model-field").hidden = data.length < 2;
}

// Return the inputs of a model in all of its tasks, such as `image` and `mask_image`.
export function listInputs(model) {
  return [...new Set(Object.values(model?.inputs ?? {}).flat())];
}

// Return the task for the given input names.
export function findTask(names) {
  if (!names.includes("image")) return "generate";
  return names.includes("mask_image") ? "inpaint" : "edit";
}

// Return the size with the area of the model's default size and the shape of an image.
export function matchSize(model, { width, height }) {
  const [defaultWidth, defaultHeight] = model.sizes[0].split("x").map(Number);
  const scale = Math.sqrt((defaultWidth * defaultHeight) / (width * height));
  const round = (side) => Math.max(1, Math.round((side * scale) / model.multiple)) * model.multiple;
  return `${round(width)}x${round(height)}`;
}
