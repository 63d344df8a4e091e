// Further arguments of the pipeline, as rows with a name and a value.
import { $, h, icon } from "./dom.js";

const REMOVE = "M4 4l8 8M12 4l-8 8";
let types = {}; // JSON types by argument name

// Offer the arguments that the selected model has for a task.
export function showArguments(model, task) {
  types = model?.arguments?.[task] ?? {};
  $("argument-names").replaceChildren(...Object.entries(types).map(([name, kinds]) => h("option", { value: name, label: kinds.join(" or ") })));
  $("argument-field").hidden = !Object.keys(types).length && !$("argument-rows").childElementCount;
  for (const row of $("argument-rows").children) describe(row);
}

export function addArgument(name = "", value = "") {
  const names = h("input", { list: "argument-names", value: name, placeholder: "name", "aria-label": "Name of the argument", spellcheck: "false", autocomplete: "off", required: true });
  const values = h("input", { value, placeholder: "value", "aria-label": "Value of the argument", spellcheck: "false", autocomplete: "off" });
  const remove = () => {
    row.remove();
    $("add-argument").focus();
  };
  const row = h("li", { class: "line" }, names, values,
    h("button", { type: "button", class: "remove", "aria-label": "Remove the argument", onclick: remove }, icon(REMOVE)));
  names.addEventListener("input", () => describe(row));
  $("argument-rows").append(row);
  describe(row);
  return names;
}

function describe(row) {
  const [name, value] = row.querySelectorAll("input");
  value.placeholder = types[name.value]?.join(" or ") ?? "value";
}

// Return the arguments by name. The service checks them and reports errors.
export function readArguments() {
  const values = {};
  for (const row of $("argument-rows").children) {
    const [name, value] = [...row.querySelectorAll("input")].map((input) => input.value.trim());
    if (name && value) values[name] = parseValue(value, types[name]);
  }
  return values;
}

function parseValue(text, kinds = []) {
  if (kinds.length === 1 && kinds[0] === "string") return text;
  try {
    return JSON.parse(text);
  } catch (error) {
    return text;
  }
}

export function setArguments(values) {
  $("argument-rows").replaceChildren();
  for (const [name, value] of Object.entries(values ?? {})) addArgument(name, typeof value === "string" ? value : JSON.stringify(value));
}
