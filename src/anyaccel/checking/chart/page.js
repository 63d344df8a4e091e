"use strict";
// Shared by the chart and the report: the data, the marks of the states, and the ledger of an attempt.

const DATA = JSON.parse(document.getElementById("data").textContent);

const STATES = {
  works: { verb: "works", says: "The right picture, and no waiting at its steps." },
  waits: { verb: "waits", says: "The right picture, but the host waits for the device at every step: slow on real hardware." },
  wrong: { verb: "wrong", says: "Silently another picture, or a limit that gives silently wrong numbers." },
  stops: { verb: "stops", says: "An error: there is no picture." },
};
const SEVERITY = { works: 0, waits: 1, wrong: 2, stops: 3 };

const EFFECTS = {
  error: { order: 0, state: "stops", says: "raises an error" },
  wrong: { order: 1, state: "wrong", says: "silently wrong numbers" },
  slow: { order: 2, state: "waits", says: "costs time" },
  narrowed: { order: 3, state: "none", says: "silently narrows the type" },
};
const EVIDENCE = { hardware: "seen on the device", documented: "documented", inferred: "inferred" };
const LINES_SHOWN = 6;

const SHAPES = {
  works: '<circle cx="8" cy="8" r="7.2"/><path class="cut" d="M4.7 8.4l2.4 2.4 4.3-5.2"/>',
  waits: '<path d="M2.4.8h11.2v2.6L9.8 8l3.8 4.6v2.6H2.4v-2.6L6.2 8 2.4 3.4z"/>',
  wrong: '<path d="M8 .4l7.9 14.8H.1z"/><path class="cut" d="M8 6v4M8 12.9v.1"/>',
  stops: '<path d="M2.6.8h10.8a1.8 1.8 0 0 1 1.8 1.8v10.8a1.8 1.8 0 0 1-1.8 1.8H2.6a1.8 1.8 0 0 1-1.8-1.8V2.6A1.8 1.8 0 0 1 2.6.8z"/><path class="cut" d="M5 5l6 6M11 5l-6 6"/>',
  none: '<path d="M4 7.2h8v1.6H4z"/>',
};
const MARKS = {};
for (const [state, shape] of Object.entries(SHAPES)) {
  const holder = document.createElement("template");
  holder.innerHTML = `<svg class="mark ${state}" viewBox="0 0 16 16" aria-hidden="true">${shape}</svg>`;
  MARKS[state] = holder.content.firstChild;
}

// An element: attributes that are null or false are left out, `onclick` listens, children that are null are left out.
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

function plural(count, one, many) {
  return `${count} ${count === 1 ? one : many}`;
}

// A figure as people read it; what is not finite comes as a word.
function figure(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (value === 0) return "0";
  return Math.abs(value) < 0.01 || Math.abs(value) >= 1e5 ? value.toExponential(1) : String(Number(value.toPrecision(3)));
}

// Text in which `this` is code.
function words(text) {
  return text.split("`").map((part, index) => (index % 2 ? h("code", {}, part) : part));
}

function link(address, text) {
  if (!/^https?:\/\//.test(address)) return h("span", {}, text ?? address);
  return h("a", { href: address, target: "_blank", rel: "noopener noreferrer", title: address }, text ?? address.replace(/^https?:\/\/(www\.)?/, ""));
}

// How the data was made: the date, the versions and whatever else is told.
function describeMade(made, seconds) {
  const { date, versions, ...rest } = made ?? {};
  const parts = [date ? `made ${date}` : "", seconds ? `in ${seconds >= 120 ? `${Math.round(seconds / 60)} minutes` : `${Math.round(seconds)} s`}` : ""];
  const words = [parts.filter(Boolean).join(" "), describeVersions(versions)];
  for (const [name, value] of Object.entries(rest)) {
    if (["string", "number"].includes(typeof value)) words.push(`${name} ${value}`);
  }
  return words.filter(Boolean).join(" · ");
}

function describeVersions(versions) {
  return Object.entries(versions ?? {}).map(([name, version]) => `${name} ${version}`).join(", ");
}

// The line on GitHub, where the version that ran is a release of a library that is there.
function codeAddress(file, line) {
  const library = ["diffusers", "transformers"].find((name) => file.startsWith(`${name}/`));
  const version = library && DATA.made?.versions?.[library];
  if (!version || !/^\d+\.\d+\.\d+$/.test(version)) return null;
  return `https://github.com/huggingface/${library}/blob/v${version}/src/${file}#L${line}`;
}

function site(one) {
  const cut = one.file.lastIndexOf("/") + 1;
  const folders = one.file.slice(0, cut).split("/").flatMap((name, index) => (index ? ["/", h("wbr"), name] : [name]));
  const name = [...folders, h("b", {}, `${one.file.slice(cut)}:${one.line}`)];
  const address = codeAddress(one.file, one.line);
  const shown = address
    ? h("a", { class: "site-file", href: address, target: "_blank", rel: "noopener noreferrer" }, name)
    : h("span", { class: "site-file" }, name);
  const operations = one.operations?.length ? h("small", {}, one.operations.join(", ")) : null;
  return h("td", {}, shown, one.code ? h("code", { class: "code" }, one.code) : null, operations);
}

function count(one) {
  if (!one) return h("td", { class: "gone" }, "none");
  return h("td", {}, `${one.count}×`, h("small", {}, one.step === null ? "outside steps" : `at step ${one.step}`));
}

function siteTable(lines, ways) {
  const head = h("tr", {}, h("th", { scope: "col" }, "line of code"), ways.map((way) => h("th", { scope: "col", class: "count", title: "how often, and the step at which it was first met" }, way)));
  const rows = lines.map((one) => h("tr", {}, site(one), one.counts.map(count)));
  return h("table", { class: "sites" }, h("thead", {}, head), h("tbody", {}, rows));
}

// One limit of the device: what it does, who says so, how to mend it, and the lines that met it.
function limitPart(group, ways) {
  const effect = EFFECTS[group.effect] ?? { state: "none", says: group.effect };
  const first = group.lines.slice(0, LINES_SHOWN), rest = group.lines.slice(LINES_SHOWN);
  const more = rest.length
    ? h("details", { class: "more" }, h("summary", {}, plural(rest.length, "more line", "more lines")), siteTable(rest, ways))
    : null;
  return h("section", { class: "limit" },
    h("div", { class: "limit-head" }, h("h4", {}, group.limit), h("span", { class: `chip ${effect.state}` }, effect.says)),
    h("p", { class: "says" }, group.says ? words(group.says) : "A limit that the device's sheet of this version does not list."),
    group.source ? h("p", { class: "source" }, h("span", {}, `${EVIDENCE[group.evidence] ?? group.evidence}:`), link(group.source)) : null,
    group.hint ? h("p", { class: "hint" }, h("b", {}, "To mend it: "), words(group.hint)) : null,
    siteTable(first, ways), more);
}

function limitParts(groups, ways) {
  const order = (group) => EFFECTS[group.effect]?.order ?? 9;
  return [...groups].sort((a, b) => order(a) - order(b)).map((group) => limitPart(group, ways));
}

// One attempt: its state in words, its error, its figures.
function wayPart(title, attempt, why, figures) {
  const state = STATES[attempt.state];
  return h("section", { class: `way ${attempt.state}` },
    h("h3", {}, title),
    h("p", { class: "state" }, mark(attempt.state), h("span", {}, state.verb)),
    h("p", { class: "small" }, why ?? state.says),
    attempt.error ? h("pre", { class: "error" }, attempt.error) : null,
    h("dl", { class: "figures" }, figures.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])));
}

// Why an attempt is in its state, from the effects that its lines had.
function explain(attempt, effects) {
  const lines = (effect) => effects.filter((one) => one === effect).length;
  if (attempt.state === "stops" && !attempt.error && lines("error")) {
    return `${plural(lines("error"), "line meets a limit that is an error", "lines meet limits that are errors")} on the device: it would stop there.`;
  }
  if (attempt.state === "wrong" && lines("wrong")) {
    return `${plural(lines("wrong"), "line meets a limit that gives", "lines meet limits that give")} silently wrong numbers there.`;
  }
  if (attempt.state === "wrong") return "It runs to the end and silently gives another picture than the CPU.";
  return null;
}

async function copy(text, status) {
  try {
    await navigator.clipboard.writeText(text);
    status.replaceChildren("copied");
  } catch {
    // No permission, or no clipboard: the text is shown, selected, to be copied by hand.
    const field = h("textarea", { readonly: true, rows: 3, "aria-label": "Text to copy" });
    field.value = text;
    status.replaceChildren(field);
    field.select();
  }
}
