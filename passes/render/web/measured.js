// What a step took (measured, or simulated of its compiled program) beside what the plan says of it.
"use strict";

const ratioText = (seconds, estimated) => (seconds === null || seconds === undefined || !estimated || estimated < 1e-8 || seconds > 1000 * estimated ? "" : `${(seconds / estimated).toFixed(seconds < 99.99 * estimated ? 2 : 0)} ×`);

/** Further columns of the table of collectives. */
function besideColumns(model) {
  const b = model.data.beside;
  if (!b || !model.data.rows.measured || ROW_HEADS.some(r => r[0] === "measured")) return;
  const none = x => (x === null ? -1 : x);
  ROW_HEADS.splice(ROW_HEADS.findIndex(r => r[0] === "seconds") + 1, 0,
    ["measured", b.word, r => none(r.measured), true],
    ["ratio", "of estimate", r => (r.measured === null ? -1 : r.measured / (r.seconds || 1)), true],
    ["waited", "waited", r => r.waited, true]);
}

/** Their cells; a row without a time says why. */
function besideCells(r, cell) {
  if (!ROW_HEADS.some(x => x[0] === "measured")) return [];
  const told = r.measured === null ? h("span", { class: "soft", title: r.remark }, "–") : h("span", { title: r.remark }, secondsText(r.measured));
  return [cell("measured", told), cell("ratio", ratioText(r.measured, r.seconds)), cell("waited", r.measured === null ? "" : secondsText(r.waited))];
}

/** A fact of a group or a collective for the panel beside the graph. */
function besideFact(model, seconds, estimated) {
  const b = model.data.beside;
  if (!b || seconds === null || seconds === undefined) return [b ? b.word : "measured", ""];
  const ratio = ratioText(seconds, estimated);
  return [b.word, `${secondsText(seconds)}, ${percentText(seconds / b.seconds)} of the step${ratio ? `, ${ratio} the estimate` : ""}`];
}

const besideGroup = (model, v) => besideFact(model, model.groups.measured && model.groups.measured[v], model.groups.seconds[v]);

/** What is said of a collective; why it has no time of its own. */
function besideRow(model, k) {
  const r = model.data.rows, b = model.data.beside;
  if (!b || !r.measured) return [];
  if (r.measured[k] === null) return [[b.word, `no time: ${r.remark[k]}`]];
  return [besideFact(model, r.measured[k], r.seconds[k]), ["of these exposed", secondsText(r.alone[k])],
    ["before, waited", `${secondsText(r.waited[k])} for others of the group`], ["remark", r.remark[k]]];
}

/** The step as it was, in the parts of the estimated bar: kernels, what nothing ran beside, waiting, and nobody's. */
function besideBar(model, select) {
  const b = model.data.beside;
  if (!b) return null;
  const parts = [], g = model.groups, phases = new Map();
  // A phase that stands in no other; those of all placements together.
  const inPhase = v => v > 0 && (g.kind[v] === "phase" || inPhase(g.parent[v]));
  if (g.measured) for (let v = 1; v < model.nGroups; v++) if (g.kind[v] === "phase" && !inPhase(g.parent[v])) {
    const one = phases.get(g.title[v]) || { seconds: 0, go: v };
    one.seconds += g.measured[v];
    phases.set(g.title[v], one);
  }
  for (const [name, p] of phases) parts.push({ name, seconds: p.seconds, className: name, go: { node: p.go } });
  const other = b.kernels[0] - parts.reduce((s, p) => s + p.seconds, 0);
  if (other > 1e-5 * b.total) parts.push({ name: phases.size ? "other kernels" : "kernels", seconds: other, className: "update", go: {} });
  const byKind = new Map(), r = model.data.rows;
  let told = 0;
  (r.alone || []).forEach((seconds, k) => { byKind.set(r.kind[k], (byKind.get(r.kind[k]) || 0) + seconds); told += seconds; });
  for (const [kind, seconds] of [...byKind].sort((x, y) => y[1] - x[1]))
    if (seconds > 0) parts.push({ name: `${KIND_WORDS[kind] || kind}, exposed`, seconds, className: kind, go: { kind } });
  if (b.exposed[0] - told > 1e-4 * b.total) parts.push({ name: "of no row, exposed", seconds: b.exposed[0] - told, className: "bubble", go: {} });
  if (b.waiting > 0) parts.push({ name: "waiting for other devices", seconds: b.waiting, className: "bubble", go: {} });
  ["before the first op", "between ops", "after the last op"].forEach((name, k) => {
    if (b.idle[k] > 0) parts.push({ name: `unattributed, ${name}`, seconds: b.idle[k], className: "bubble", go: {} });
  });
  const total = parts.reduce((s, p) => s + p.seconds, 0) || 1;
  const part = p => h("button", { type: "button", class: `part ${p.className}`, style: `flex:${p.seconds / total} 1 0`,
    title: `${p.name}: ${secondsText(p.seconds)}, ${percentText(p.seconds / total)}`, onclick: () => Object.keys(p.go).length && select(p.go) },
  h("span", {}, p.seconds / total > 0.07 ? `${p.name} ${percentText(p.seconds / total)}` : ""));
  const f = model.data.figures;
  return h("section", { class: "beside", "aria-label": `the step as ${b.word}` },
    h("p", { class: "soft" }, `above: ${secondsText(f.step_seconds)} estimated; below: ${secondsText(b.seconds)} ${b.word} ${b.how}, ${ratioText(b.seconds, f.step_seconds)} the estimate`),
    h("div", { class: "bar" }, parts.map(part)),
    h("p", { class: "legend soft" }, parts.map(p => h("span", {}, h("i", { class: `key ${p.className}` }), ` ${p.name} ${secondsText(p.seconds)}  `))));
}

/** The parts of the step, and the lines with their kernels. */
function besidePanel(model, word) {
  const b = model.data.beside;
  if (!b || b.word !== word) return null;
  const n = (text, name) => h("td", { class: `n ${name || ""}` }, text), heads = (...texts) => h("thead", {}, h("tr", {}, texts.map(([t, side]) => h("th", { class: side ? "n" : "", scope: "col" }, t))));
  const line = (name, seconds, estimated) => h("tr", {}, h("td", {}, name), n(secondsText(seconds)), n(percentText(seconds / (b.total || 1))),
    n(estimated === null || estimated === undefined ? "" : secondsText(estimated)), n(ratioText(seconds, estimated)));
  const parts = h("table", { class: "parts" }, heads(["where the time went"], [word, 1], ["share", 1], ["estimated", 1], ["of estimate", 1]), h("tbody", {},
    line("kernels", ...b.kernels), line("collectives, nothing beside them", ...b.exposed), line("waiting for other devices", b.waiting),
    line("unattributed: until the first op began", b.idle[0]), line("unattributed: between ops", b.idle[1]), line("unattributed: until all results were there", b.idle[2]),
    line(b.places ? `step, on each of ${b.places} placements` : "step", b.total, model.data.figures.step_seconds * (b.places || 1))));
  const l = b.lines;
  const lines = l.line.length ? [h("h3", {}, "Kernels, by your lines"), h("div", { class: "scroll" }, h("table", { class: "lines" },
    heads(["pass"], ["line"], ["ops", 1], [word, 1], ["share", 1], ["estimated", 1], ["of estimate", 1]), h("tbody", {}, l.line.map((where, k) => h("tr", {},
      h("td", {}, l.phase[k]), h("td", { class: "mono" }, where), n(l.ops[k] ? String(l.ops[k]) : ""), n(secondsText(l.seconds[k])), n(percentText(l.seconds[k] / (b.seconds || 1))),
      n(secondsText(l.estimated[k])), n(ratioText(l.seconds[k], l.estimated[k])))))))] : [];
  return h("div", { class: "beside-tables" }, h("p", { class: "soft" }, `One step, ${word} ${b.how}; ${b.places ? "of all placements together, each a mean of its devices" : `means of ${b.devices} devices`}. An instant in which a device runs kernels is theirs; `
    + "else what it sends has it, else what it waits to send: so the parts add up to the step."), parts, ...lines);
}

window.sbpPanels = { Measured: model => besidePanel(model, "measured"), Simulated: model => besidePanel(model, "simulated"), ...window.sbpPanels };
