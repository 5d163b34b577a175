// Panels below the graph: the timelines, the memory, the placements and the stages.
"use strict";

/** What a device holds over the step, against what it has. */
function memoryCurve(memory, figures, when = "over the step") {
  const course = memory.course, n = course.length;
  if (n < 2) return null;
  const NS = "http://www.w3.org/2000/svg", W = 900, H = 160, most = Math.max(...course), near = figures.capacity_bytes && figures.capacity_bytes < 3 * most;
  const top = near ? Math.max(figures.capacity_bytes, most) * 1.05 : most * 1.1, y = b => (H - H * b / top).toFixed(1);
  const times = memory.seconds.length === n ? memory.seconds : course.map((_, k) => k / (n - 1)), end = times[n - 1] || 1, x = k => (W * times[k] / end).toFixed(1);
  const svg = document.createElementNS(NS, "svg");
  for (const [k, v] of Object.entries({ viewBox: `0 0 ${W} ${H + 4}`, role: "img", class: "curve", preserveAspectRatio: "none" })) svg.setAttribute(k, v);
  const add = (name, attributes) => { const e = document.createElementNS(NS, name); for (const [k, v] of Object.entries(attributes)) e.setAttribute(k, v); svg.append(e); return e; };
  const peak = course.indexOf(most), said = `memory ${when}: at most ${bytesText(most)}, ${secondsText(times[peak])} after its beginning`;
  add("title", {}).textContent = said;
  add("path", { class: "held", d: `M0,${H} ` + course.map((b, k) => `${k ? `H${x(k)} ` : ""}L${x(k)},${y(b)}`).join(" ") + ` L${W},${H} Z` });
  if (near) add("line", { x1: 0, x2: W, y1: y(figures.capacity_bytes), y2: y(figures.capacity_bytes), class: "limit" });
  return h("figure", { class: "course" }, svg, h("div", { class: "ends soft" }, h("span", {}, "0 s"), h("span", {}, secondsText(end / 2)), h("span", {}, secondsText(end))),
    h("figcaption", { class: "soft" }, `${said}${near ? "; the line is what a device has" : ""}.`));
}

/** The devices of a placement, by its axes, with their hosts. */
function meshTable(place) {
  const last = place.mesh[place.mesh.length - 1], rows = Math.min(place.ranks.length / last, 16), columns = Math.min(last, 16);
  const coordinates = row => {
    let rest = row;
    const at = [];
    for (let a = place.mesh.length - 2; a >= 0; a--) { at.unshift(`${place.axes[a]} ${rest % place.mesh[a]}`); rest = Math.floor(rest / place.mesh[a]); }
    return at.join(", ");
  };
  const cell = rank => h("td", { class: `device host${(place.hosts ? Math.floor(rank / place.hosts) : 0) % 2}` }, String(rank), place.hosts ? h("small", {}, `host ${Math.floor(rank / place.hosts)}`) : null);
  const axis = place.axes[place.axes.length - 1];
  return h("div", { class: "scroll" }, h("table", { class: "mesh" }, h("thead", {}, h("tr", {}, h("th", {}), Array.from({ length: columns }, (_, k) => h("th", { scope: "col" }, `${axis} ${k}`)), last > columns ? h("th", {}, "…") : null)),
    h("tbody", {}, Array.from({ length: rows }, (_, row) => h("tr", {}, h("th", { scope: "row" }, coordinates(row)), Array.from({ length: columns }, (_, k) => cell(place.ranks[row * last + k])), last > columns ? h("td", {}, "…") : null)),
      place.ranks.length / last > rows ? h("tr", {}, h("th", {}, `and ${place.ranks.length / last - rows} more`)) : null)));
}

/** What is split along an axis, and what lies whole along it. */
function axisOf(place, a, tensors) {
  const lies = sbp => parseSbp(sbp)[a], at = place.rest.sbp.map((_, k) => k), path = k => place.rest.path[k] + (place.rest.leaves[k] ? `, ${place.rest.leaves[k]}` : "");
  const split = at.filter(k => lies(place.rest.sbp[k]).kind === "S"), whole = at.filter(k => lies(place.rest.sbp[k]).kind === "B");
  const made = tensors.filter(t => lies(t.sbp).kind !== "B").sort((x, y) => y.bytes - x.bytes), n = 8;
  const list = (items, text) => h("ul", { class: "plain mono" }, items.slice(0, 40).map(k => h("li", {}, text(k))), items.length > 40 ? h("li", { class: "soft" }, `and ${items.length - 40} more`) : null);
  return h("section", { class: "axis" }, h("h3", {}, `${place.axes[a]}: ${place.mesh[a]} devices, ${place.levels[a]}`),
    h("div", { class: "columns" },
      h("div", {}, h("h4", {}, "split at rest"), split.length ? list(split, k => `dim ${lies(place.rest.sbp[k]).dim} of ${path(k)}`) : h("p", { class: "soft" }, "nothing")),
      h("div", {}, h("h4", {}, "a copy on each, at rest"), whole.length ? list(whole, path) : h("p", { class: "soft" }, "nothing")),
      h("div", {}, h("h4", {}, "split or partial while it runs, the largest"), made.length ? list(made.slice(0, n), t => {
        const s = lies(t.sbp);
        return `${s.kind === "S" ? `dim ${s.dim}` : `part of a ${s.op}`} of ${t.name} ${t.type}`;
      }) : h("p", { class: "soft" }, "nothing"), made.length > n ? h("p", { class: "soft" }, `and ${made.length - n} more`) : null)));
}

function placements(model) {
  const t = model.data.tensors || { name: [] };
  return h("div", {}, model.data.places.map((place, p) => {
    const own = t.name.map((name, k) => ({ name, place: t.place[k], sbp: t.sbp[k], bytes: t.bytes[k], type: typeText(t.dtype[k], t.shape[k]) })).filter(x => x.place === p);
    return h("section", { class: "placement" }, h("h2", {}, place.name), h("p", { class: "soft" }, `${place.ranks.length} devices${place.hosts ? `, ${place.hosts} of them in a host` : ""}; ${bytesText(place.memory_bytes)} at the peak on each.`),
      meshTable(place), place.axes.map((_, a) => axisOf(place, a, own)));
  }));
}

/** What a device of each placement holds over the schedule, and of what that is made. */
function placeMemories(memories, figures) {
  return h("div", {}, memories.map(m => {
    const capacity = figures.capacity_bytes, row = (what, bytes, type, sbp, inner) => h("tr", { class: inner ? "inner" : "" }, h("td", {}, what), h("td", { class: "mono soft" }, type || ""), h("td", { class: "mono" }, sbp || ""),
      h("td", { class: "n" }, bytesText(bytes)), h("td", { class: "n" }, percentText(bytes / (m.peak || 1))));
    const r = m.rows;
    return h("section", { class: "placement" }, h("h2", {}, m.title), h("p", {}, `${bytesText(m.peak)} at the peak on each device`, capacity ? `, ${percentText(m.peak / capacity)} of the ${bytesText(capacity)} that it has` : "", "."),
      memoryCurve(m, figures, "over the micro-batches"), h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ["what", "type", "lies", "bytes", "share"].map((t, k) => h("th", { class: k > 2 ? "n" : "" }, t)))),
        h("tbody", {}, r.what.map((what, k) => row(what, r.bytes[k], r.type[k], r.sbp[k], r.inner[k]))))));
  }));
}

window.sbpPanels = {
  Timeline: (model, select, timelines) => (timelines ? timelines.element : null),
  Memory: model => {
    const m = model.data.memory, f = model.data.figures;
    if (model.data.memories && model.data.memories.length) return placeMemories(model.data.memories, f);
    if (!m) return null;
    const capacity = f.capacity_bytes || f.memory_bytes, live = m.live, shown = Math.min(live.name.length, 40);
    const rest = live.bytes.slice(shown).reduce((a, b) => a + b, 0);
    const row = (name, type, sbp, bytes) => h("tr", {}, h("td", {}, name), h("td", { class: "mono soft" }, type), h("td", { class: "mono" }, sbp),
      h("td", { class: "n" }, bytesText(bytes)), h("td", { class: "n" }, percentText(bytes / (f.memory_bytes || 1))));
    return h("div", {}, h("p", {}, `${bytesText(f.memory_bytes)} at the peak`, f.capacity_bytes ? `, ${percentText(f.memory_bytes / capacity)} of the ${bytesText(capacity)} of a device` : "", "."),
      memoryCurve(m, f), h("h3", {}, "Alive at the peak"),
      h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ["tensor", "type", "lies", "bytes", "share"].map((t, k) => h("th", { class: k > 2 ? "n" : "" }, t)))),
        h("tbody", {}, Array.from({ length: shown }, (_, k) => row(live.name[k], live.type[k], live.sbp[k], live.bytes[k])),
          rest > 0 ? row(`and ${live.name.length - shown} smaller`, "", "", rest) : null, m.between_bytes > 0 ? row("between them, unused", "", "", m.between_bytes) : null))));
  },
  Placement: placements,
  Stages: model => {
    const s = model.data.stages;
    if (!s || !s.stage.length) return null;
    const heads = ["stage", "placement", "forward", "backward", "kept of a micro-batch", "weights"];
    return h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, heads.map((t, k) => h("th", { class: k > 1 ? "n" : "" }, t)))), h("tbody", {}, s.stage.map((k, i) =>
      h("tr", {}, h("td", {}, String(k)), h("td", {}, s.place[i]), h("td", { class: "n" }, secondsText(s.forward[i])), h("td", { class: "n" }, secondsText(s.inputs[i] + s.weights[i])),
        h("td", { class: "n" }, bytesText(s.kept_bytes[i])), h("td", { class: "n" }, bytesText(s.weight_bytes[i])))))));
  },
};
