// Functions that create elements and format text.
// User input is only ever set as text, never as HTML.

export const $ = (id) => document.getElementById(id);
export const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const SVG = "http://www.w3.org/2000/svg";

// Create an element. Skips attributes and children that are null; `on…` attributes add event listeners.
export function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

// Create a decorative icon of 16 × 16 from an SVG path.
export function icon(path) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 16 16");
  svg.setAttribute("aria-hidden", "true");
  svg.setAttribute("class", "icon");
  svg.append(document.createElementNS(SVG, "path"));
  svg.firstChild.setAttribute("d", path);
  return svg;
}

export function plural(count, singular, pluralForm) {
  return `${count} ${count === 1 ? singular : pluralForm}`;
}

// Format a duration: `4.2 s`, `35 s`, `2 min 5 s`.
export function formatSeconds(seconds) {
  if (seconds < 9.95) return `${Math.round(10 * seconds) / 10} s`;
  const rounded = Math.round(seconds);
  return rounded < 60 ? `${rounded} s` : `${Math.floor(rounded / 60)} min ${rounded % 60} s`;
}

// Announce a change to screen readers.
export function announce(text) {
  $("announcement").textContent = text;
}
