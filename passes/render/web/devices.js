// A drawing of which device holds what of a tensor.
"use strict";

const MAX_DEVICES = 64;

/** "[S(0), B]" -> [{kind: "S", dim: 0}, {kind: "B"}]. */
function parseSbp(text) {
  return [...text.matchAll(/S\((\d+)\)|P(?:\((\w+)\))?|B/g)].map(m =>
    m[1] !== undefined ? { kind: "S", dim: Number(m[1]) } : m[0] === "B" ? { kind: "B" } : { kind: "P", op: m[2] || "sum" });
}

/** Per split dim, from where to where a device holds it, in parts of the dim as it is padded. */
function shardOf(coordinates, nd, mesh, shape) {
  const from = shape.map(() => 0), to = shape.map(() => 1);
  nd.forEach((s, axis) => {
    if (s.kind !== "S") return;
    const width = (to[s.dim] - from[s.dim]) / mesh[axis];
    from[s.dim] += coordinates[axis] * width;
    to[s.dim] = from[s.dim] + width;
  });
  return { from, to };
}

/** By how much a dim is longer where it is cut into equal parts. */
function padding(nd, mesh, shape) {
  return shape.map((size, dim) => {
    const parts = nd.reduce((n, s, axis) => (s.kind === "S" && s.dim === dim ? n * mesh[axis] : n), 1);
    return Math.ceil(size / parts) * parts - size;
  });
}

function deviceDrawing(shape, sbp, mesh, axes) {
  const nd = parseSbp(sbp), total = mesh.reduce((a, b) => a * b, 1);
  if (!shape || !shape.length || nd.length !== mesh.length) return null;
  const split = [...new Set(nd.filter(s => s.kind === "S").map(s => s.dim))].sort((a, b) => a - b);
  const down = split[0] ?? 0, across = split.find(d => d !== down) ?? (shape.length > down + 1 ? down + 1 : -1);
  const columns = Math.min(mesh[mesh.length - 1], 16), pad = padding(nd, mesh, shape);
  const partial = nd.some(s => s.kind === "P"), shown = Math.min(total, MAX_DEVICES);
  const W = 54, H = 40, GAP = 10, rows = Math.ceil(shown / columns);
  const NS = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(NS, "svg");
  const add = (name, attributes, text) => {
    const e = document.createElementNS(NS, name);
    for (const [k, v] of Object.entries(attributes)) e.setAttribute(k, v);
    if (text !== undefined) e.textContent = text;
    svg.append(e);
    return e;
  };
  const width = columns * (W + GAP) + GAP, height = rows * (H + 16 + GAP) + GAP;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("width", Math.min(width, 560));
  svg.setAttribute("role", "img");
  svg.setAttribute("class", "devices");
  const defs = add("defs", {});
  const hatch = document.createElementNS(NS, "pattern");
  for (const [k, v] of Object.entries({ id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" })) hatch.setAttribute(k, v);
  const stripe = document.createElementNS(NS, "rect");
  for (const [k, v] of Object.entries({ width: 3, height: 6, class: "held" })) stripe.setAttribute(k, v);
  hatch.append(stripe);
  defs.append(hatch);
  for (let d = 0; d < shown; d++) {
    const at = [];
    for (let a = mesh.length - 1, rest = d; a >= 0; a--) { at[a] = rest % mesh[a]; rest = Math.floor(rest / mesh[a]); }
    const { from, to } = shardOf(at, nd, mesh, shape);
    const x = GAP + (d % columns) * (W + GAP), y = GAP + Math.floor(d / columns) * (H + 16 + GAP);
    const x0 = across < 0 ? 0 : from[across], x1 = across < 0 ? 1 : to[across];
    add("rect", { x, y, width: W, height: H, class: "whole" });
    add("rect", { x: x + W * x0, y: y + H * from[down], width: W * (x1 - x0), height: H * (to[down] - from[down]),
      class: partial ? "partial" : "held" });
    // What lies behind the end of a dim that does not divide is padding.
    const end = shape[down] / (shape[down] + pad[down]);
    if (pad[down] && to[down] > end) {
      const begin = Math.max(from[down], end);
      add("rect", { x, y: y + H * begin, width: W, height: H * (to[down] - begin), class: "padding" });
    }
    add("text", { x: x + W / 2, y: y + H + 12, "text-anchor": "middle" }, String(d));
  }
  const local = shape.map((size, dim) => nd.reduce((n, s, a) => (s.kind === "S" && s.dim === dim ? Math.ceil(n / mesh[a]) : n), size));
  const said = [
    nd.map((s, a) => s.kind === "S" ? `dim ${s.dim} split over ${axes[a]}` : s.kind === "B" ? `a copy on each of ${axes[a]}`
      : `a part of a ${s.op} on each of ${axes[a]}, hatched`).join("; "),
    `each device has [${local.join(", ")}]`,
    pad.some(p => p) ? `padded by ${pad.map((p, d) => p && `${p} in dim ${d}`).filter(Boolean).join(", ")}` : "",
    total > shown ? `${shown} of ${total} devices are drawn` : "",
  ].filter(Boolean).join(". ");
  add("title", {}, said);
  return h("figure", {}, svg, h("figcaption", { class: "soft" }, `${said}.`));
}
