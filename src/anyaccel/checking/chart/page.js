"use strict";
// Shared by the chart and the report: the data, the state marks, and the ledger of a run.

const DATA = JSON.parse(document.getElementById("data").textContent);

const STATES = {
  works: { verb: "works", says: "The correct image, and no synchronization per step." },
  waits: { verb: "waits", says: "The correct image, but the CPU waits for the device at every step, which is slow on real hardware." },
  wrong: { verb: "wrong", says: "A different image without an error, or a limit with silently wrong values." },
  stops: { verb: "stops", says: "An error, and no image." },
};
const SEVERITY = { works: 0, waits: 1, wrong: 2, stops: 3 };

const EFFECTS = {
  error: { order: 0, state: "stops", says: "raises an error" },
  wrong: { order: 1, state: "wrong", says: "silently wrong values" },
  slow: { order: 2, state: "waits", says: "slow" },
  narrowed: { order: 3, state: "none", says: "silently narrows the dtype" },
};
const EVIDENCE = { hardware: "measured on the device", documented: "documented", inferred: "inferred" };
// Lines of code per limit that are visible without expanding it.
const LINES_SHOWN = 6;

const SHAPES = {
  works: '<circle cx="8" cy="8" r="7.2"/><path class="cut" d="M4.7 8.4l2.4 2.4 4.3-5.2"/>',
  waits: '<path d="M2.4.8h11.2v2.6L9.8 8l3.8 4.6v2.6H2.4v-2.6L6.2 8 2.4 3.4z"/>',
  wrong: '<path d="M8 .4l7.9 14.8H.1z"/><path class="cut" d="M8 6v4M8 12.9v.1"/>',
  stops: '<path d="M2.6.8h10.8a1.8 1.8 0 0 1 1.8 1.8v10.8a1.8 1.8 0 0 1-1.8 1.8H2.6a1.8 1.8 0 0 1-1.8-1.8V2.6A1.8 1.8 0 0 1 2.6.8z"/><path class="cut" d="M5 5l6 6M11 5l-6 6"/>',
  none: '<path d="M4 7.2h8v1.6H4z"/>',
};
// Parsed once and cloned, because a chart has more than a thousand marks.
const MARKS = {};
for (const [state, shape] of Object.entries(SHAPES)) {
  const holder = document.createElement("template");
  holder.innerHTML = `<svg class="mark ${state}" viewBox="0 0 16 16" aria-hidden="true">${shape}</svg>`;
  MARKS[state] = holder.content.firstChild;
}

// Create an element. Attributes and children that are null (or false) are omitted; `on…` attributes add listeners.
function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

function mark(state) {
  return (MARKS[state] ?? MARKS.none).cloneNode(true);
}

function plural(count, singular, many) {
  return `${count} ${count === 1 ? singular : many}`;
}

// Format a number. NaN and infinity arrive as strings, because JSON does not have them.
function figure(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (value === 0) return "0";
  return Math.abs(value) < 0.01 || Math.abs(value) >= 1e5 ? value.toExponential(1) : String(Number(value.toPrecision(3)));
}

// Turn `backticks` into code elements.
function formatText(text) {
  return text.split("`").map((part, index) => (index % 2 ? h("code", {}, part) : part));
}

function link(address, text) {
  if (!/^https?:\/\//.test(address)) return h("span", {}, text ?? address);
  return h("a", { href: address, target: "_blank", rel: "noopener noreferrer", title: address }, text ?? address.replace(/^https?:\/\/(www\.)?/, ""));
}

// One line with the date, the duration, the versions and the other fields of `made`.
function describeMade(made, seconds) {
  const { date, versions, ...others } = made ?? {};
  const parts = [date ? `generated ${date}` : "", seconds ? `in ${seconds >= 120 ? `${Math.round(seconds / 60)} minutes` : `${Math.round(seconds)} s`}` : ""];
  const items = [parts.filter(Boolean).join(" "), describeVersions(versions)];
  for (const [name, value] of Object.entries(others)) {
    if (["string", "number"].includes(typeof value)) items.push(`${name} ${value}`);
  }
  return items.filter(Boolean).join(" · ");
}

function describeVersions(versions) {
  return Object.entries(versions ?? {}).map(([name, version]) => `${name} ${version}`).join(", ");
}

// URL of a line on GitHub, if the file belongs to a released version of a known library; else null.
function codeAddress(file, line) {
  const library = ["diffusers", "transformers"].find((name) => file.startsWith(`${name}/`));
  const version = library && DATA.made?.versions?.[library];
  // Development versions have no tag on GitHub.
  if (!version || !/^\d+\.\d+\.\d+$/.test(version)) return null;
  return `https://github.com/huggingface/${library}/blob/v${version}/src/${file}#L${line}`;
}

function siteCell(line) {
  // `wbr` lets a long path break after each slash.
  const cut = line.file.lastIndexOf("/") + 1;
  const folders = line.file.slice(0, cut).split("/").flatMap((name, index) => (index ? ["/", h("wbr"), name] : [name]));
  const name = [...folders, h("b", {}, `${line.file.slice(cut)}:${line.line}`)];
  const address = codeAddress(line.file, line.line);
  const shown = address
    ? h("a", { class: "site-file", href: address, target: "_blank", rel: "noopener noreferrer" }, name)
    : h("span", { class: "site-file" }, name);
  const operations = line.operations?.length ? h("small", {}, line.operations.join(", ")) : null;
  return h("td", {}, shown, line.code ? h("code", { class: "code" }, line.code) : null, operations);
}

function countCell(hits) {
  if (!hits) return h("td", { class: "gone" }, "none");
  return h("td", {}, `${hits.count}×`, h("small", {}, hits.step === null ? "outside the steps" : `step ${hits.step}`));
}

function siteTable(lines, modes) {
  const head = h("tr", {}, h("th", { scope: "col" }, "line of code"), modes.map((mode) => h("th", { scope: "col", class: "count", title: "number of hits, and the first step" }, mode)));
  const rows = lines.map((line) => h("tr", {}, siteCell(line), line.counts.map(countCell)));
  return h("table", { class: "sites" }, h("thead", {}, head), h("tbody", {}, rows));
}

// One limit of the device: its effect, source and hint, and the lines that hit it.
function limitSection(group, modes) {
  const effect = EFFECTS[group.effect] ?? { state: "none", says: group.effect };
  const first = group.lines.slice(0, LINES_SHOWN), others = group.lines.slice(LINES_SHOWN);
  const more = others.length
    ? h("details", { class: "more" }, h("summary", {}, plural(others.length, "more line", "more lines")), siteTable(others, modes))
    : null;
  return h("section", { class: "limit" },
    h("div", { class: "limit-head" }, h("h4", {}, group.limit), h("span", { class: `chip ${effect.state}` }, effect.says)),
    h("p", { class: "says" }, group.says ? formatText(group.says) : "This limit is not on the device sheet of this version."),
    group.source ? h("p", { class: "source" }, h("span", {}, `${EVIDENCE[group.evidence] ?? group.evidence}:`), link(group.source)) : null,
    group.hint ? h("p", { class: "hint" }, h("b", {}, "Fix: "), formatText(group.hint)) : null,
    siteTable(first, modes), more);
}

function limitSections(groups, modes) {
  const order = (group) => EFFECTS[group.effect]?.order ?? 9;
  return [...groups].sort((a, b) => order(a) - order(b)).map((group) => limitSection(group, modes));
}

// One run: its state, its error and its figures.
function runSection(title, attempt, reason, figures) {
  const state = STATES[attempt.state];
  return h("section", { class: `run ${attempt.state}` },
    h("h3", {}, title),
    h("p", { class: "state" }, mark(attempt.state), h("span", {}, state.verb)),
    h("p", { class: "small" }, reason ?? state.says),
    attempt.error ? h("pre", { class: "error" }, attempt.error) : null,
    h("dl", { class: "figures" }, figures.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])));
}

// The reason for the state of a run, from the effects of the limits that its lines hit.
function explainState(attempt, effects) {
  const lines = (effect) => effects.filter((other) => other === effect).length;
  if (attempt.state === "stops" && !attempt.error && lines("error")) {
    return `${plural(lines("error"), "line hits a limit that raises", "lines hit limits that raise")} an error on the device.`;
  }
  if (attempt.state === "wrong" && lines("wrong")) {
    return `${plural(lines("wrong"), "line hits a limit", "lines hit limits")} with silently wrong values on the device.`;
  }
  if (attempt.state === "wrong") return "It finishes without an error, but the image differs from the CPU's.";
  return null;
}

async function copy(text, status) {
  try {
    await navigator.clipboard.writeText(text);
    status.replaceChildren("copied");
  } catch {
    // No permission or no clipboard: show the text, selected, for manual copying.
    const field = h("textarea", { readonly: true, rows: 3, "aria-label": "Text to copy" });
    field.value = text;
    status.replaceChildren(field);
    field.select();
  }
}
