// Figures and elements in words; nothing here knows the plan.
"use strict";

/** Fill, border, code and word of what has a colour: one table for pages and pictures (colours.py). */
const MARKS = JSON.parse(document.getElementById("marks").textContent);
const KIND_WORDS = Object.fromEntries(Object.entries(MARKS).map(([kind, mark]) => [kind, mark.word]));
const INK = "#1f2933"; // on every fill, light and dark

const CHANGE_SIGNS = { added: "+", removed: "−", changed: "±", same: "" };

/** A number with three digits and a unit: 1234 -> "1.23 kB". */
function withUnit(value, units, step) {
  let k = 0;
  while (k + 1 < units.length && Math.abs(value) >= step * 0.9995) { value /= step; k += 1; }
  const digits = value === 0 || Math.abs(value) >= 100 || Number.isInteger(value) ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  return `${value.toFixed(digits)} ${units[k]}`;
}

const bytesText = n => withUnit(n, ["B", "kB", "MB", "GB", "TB"], 1000);

/** Seconds with three digits: 0.0012 -> "1.20 ms". */
function secondsText(s) {
  if (s === 0) return "0 s";
  if (Math.abs(s) >= 0.9995) return withUnit(s, ["s"], 1000);
  return Math.abs(s) >= 0.9995e-3 ? withUnit(s * 1e3, ["ms"], 1e9) : withUnit(s * 1e6, ["µs"], 1e9);
}

const percentText = part => (part >= 0.0995 ? `${(100 * part).toFixed(0)} %` : `${(100 * part).toFixed(1)} %`);

/** A type as JAX shortens it: float32 -> f32. */
const shortType = t => t.replace("bfloat", "bf").replace("float", "f").replace("uint", "u").replace("int", "i")
  .replace("complex", "c");

const typeText = (dtype, shape) => `${shortType(dtype)}[${(shape || []).join(", ")}]`;

/** An element. Texts become text nodes, never markup: names of a program are data. */
function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") element.style.cssText = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(3).filter(c => c !== null && c !== undefined && c !== false));
  return element;
}

const pill = kind => h("span", { class: `pill ${kind}` }, KIND_WORDS[kind] || kind);

/** A small square in a colour, with its code: a second cue for who sees no difference in colours. */
const key = kind => h("i", { class: `key ${kind}`, "aria-hidden": "true" }, (MARKS[kind] || { code: "" }).code);
