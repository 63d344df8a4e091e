// The `anyaccel serve` web page: submits jobs, follows their events and shows their results.
import { ServiceError, call } from "./api.js";
import { addArgument } from "./arguments.js";
import { $, h } from "./dom.js";
import { fillForm, readForm, readSettings, showLimits, showLoras, showModel, showSize, showTask } from "./form.js";
import { RECENT, loaded, markOutdated, refresh, setActions, showOlder, showResult } from "./history.js";
import { addInputListeners, addResult } from "./inputs.js";
import { addMaskListeners } from "./mask.js";
import { findStill } from "./media.js";
import { loadModels, models, setLimits, listInputs, currentModel } from "./models.js";
import { findInputs, generate, listLive, updateJob } from "./running.js";
import { addViewerListeners, openViewer } from "./viewer.js";

const POLL_MS = 3000, POLL_WHILE_STARTING_MS = 1000;

// Status of the service

let shownDevices = "";

function showStatus(status) {
  const { queued, running, limits } = status;
  const parts = [running ? `${running} running` : "", queued ? `${queued} queued` : ""].filter(Boolean);
  $("queue").textContent = status.state === "ready" ? parts.join(", ") || "ready" : status.state;
  $("queue").dataset.state = status.state === "ready" && running ? "busy" : status.state;
  notify({
    starting: status.doing === "starting" ? "The service is starting." : `The service is starting: ${status.doing}.`,
    broken: `The service cannot start: ${status.doing}.`,
    ending: "The service is shutting down and does not accept new requests.",
  }[status.state] ?? "");
  setLimits(limits);
  showLimits();
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
    if (served && served !== [...models.keys()].join("\n")) {
      await loadModels();
      showModel();
    } else if (status.models.some(({ name, loras }) => String(loras) !== String(models.get(name).loras))) {
      await loadModels(); // LoRAs were added or removed
      showLoras();
    }
    showStatus(status);
    if (!loaded) await refresh();
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

async function submitForm() {
  const body = await readForm();
  if (!body.prompt) return $("prompt").focus();
  generate(body);
}

async function reuse({ job }) {
  await fillForm(job.request, findInputs(job.id));
  scrollTo({ top: 0 });
  $("prompt").focus();
}

// Use a result as the input, with a model that accepts one.
async function useAsInput(item) {
  if (!listInputs(currentModel()).includes("image")) {
    const other = [...models.values()].find((model) => listInputs(model).includes("image"));
    if (!other) return notify("No model of this service accepts an input image.");
    $("model").value = other.id;
    showModel();
  }
  await addResult(findStill(item));
  scrollTo({ top: 0 });
  $("prompt").focus();
}

const again = ({ job, result }) => generate(readSettings(job, result.seed, findInputs(job.id), 1));
const vary = ({ job }) => generate(readSettings(job, null, findInputs(job.id)));

function addFormListeners() {
  $("generate-form").addEventListener("submit", (event) => {
    event.preventDefault();
    submitForm();
  });
  // Open the details that contain an invalid field: the browser cannot focus a hidden one.
  $("generate-form").addEventListener("invalid", (event) => {
    for (const id of ["settings", "more"]) $(id).open ||= $(id).contains(event.target);
  }, true);
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return; // Enter also ends an IME composition
    event.preventDefault();
    $("generate-form").requestSubmit();
  });
  $("model").addEventListener("change", showModel);
  $("lora").addEventListener("change", showTask);
  $("size").addEventListener("change", () => {
    showSize();
    if ($("size").value === "other") $("width").focus();
  });
  $("add-argument").addEventListener("click", () => addArgument().focus());
  $("older").addEventListener("click", () => showOlder().catch((error) => notify(`${error.message}.`)));
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) markOutdated(); // reload the whole list when the page becomes visible again
    poll();
  });
}

setActions({ open: openViewer, reuse, vary, use: useAsInput, update: updateJob });
addFormListeners();
addInputListeners(showTask);
addMaskListeners();
addViewerListeners({ again, vary, reuse, use: useAsInput });
document.addEventListener("rowschange", showResult);
document.addEventListener("jobend", poll);
if (matchMedia("(min-width: 900px)").matches) {
  $("settings").open = true;
  $("prompt").focus(); // on a phone it would open the keyboard
}
poll();
