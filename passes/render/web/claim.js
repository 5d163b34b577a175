// The first screen: what the plan claims, and where the time goes.
"use strict";

function claim(model, select) {
  const d = model.data, f = d.figures, capacity = f.capacity_bytes;
  const figure = (name, value, note, className) =>
    h("div", { class: `figure ${className || ""}` }, h("dt", {}, name), h("dd", {}, value), h("p", { class: "soft" }, note || ""));
  const sent = f.kinds.map(([kind, n]) => `${n} ${KIND_WORDS[kind] || kind}`).join(", ") || "no collectives";
  return h("header", { class: "claim" },
    h("h1", {}, d.name, " ", h("small", {}, `on ${d.placement}, planned for ${d.hardware}`)),
    f.misfit ? h("p", { class: "alarm", role: "alert" }, f.misfit) : null,
    h("dl", { class: "figures" },
      figure("step", secondsText(f.step_seconds), "estimated, collectives beside kernels"),
      f.bubble === null || f.bubble === undefined ? null : figure("bubble", percentText(f.bubble), "of all placements' time in the loop" + f.bubble_cause),
      figure("communication", `${secondsText(f.exposed_seconds)} exposed`,
        `of ${secondsText(f.sent_seconds)}; the rest is hidden behind kernels`),
      figure("sent", `${bytesText(f.wire_bytes)}`, `per device and step: ${sent}`),
      figure("memory", bytesText(f.memory_bytes),
        capacity ? `of ${bytesText(capacity)} per device: ${f.fits ? "fits" : "does not fit"}` : "per device at the peak",
        f.fits ? "good" : "bad"),
      figure("plan", f.gap, f.verdict === f.gap ? "" : f.verdict, f.cut_short ? "warn" : f.proven ? "good" : "")),
    (d.measured || []).length ? h("dl", { class: "facts measured" }, d.measured.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])) : null,
    stepBar(model, select),
    besideBar(model, select),
    costliest(model, select));
}

/** The step split into kernels, by phase, and what they wait for collectives. */
function stepBar(model, select) {
  const f = model.data.figures, parts = [];
  // Phases that hold no others, those of all placements together.
  const g = model.groups, holds = v => model.inside[v].some(c => !model.isSent(c) && (g.kind[c] === "phase" || holds(c)));
  const phases = new Map();
  for (let v = 1; v < model.nGroups; v++) if (g.kind[v] === "phase" && !holds(v)) {
    const one = phases.get(g.title[v]) || { seconds: 0, go: v };
    one.seconds += g.seconds[v];
    phases.set(g.title[v], one);
  }
  const bubble = (f.bubble || 0) * f.step_seconds * model.data.places.length;
  const kernels = f.bubble === undefined || f.bubble === null ? f.step_seconds - f.exposed_seconds : [...phases.values()].reduce((s, p) => s + p.seconds, 0);
  const counted = [...phases.values()].reduce((s, p) => s + p.seconds, 0);
  for (const [name, p] of phases) parts.push({ name, seconds: kernels * p.seconds / (counted || 1), className: name, go: { node: p.go } });
  if (!phases.size) parts.push({ name: "kernels", seconds: kernels, className: "forward", go: {} });
  const byKind = new Map();
  model.data.rows.kind.forEach((kind, k) => byKind.set(kind, (byKind.get(kind) || 0) + model.data.rows.exposed[k]));
  for (const [kind, seconds] of [...byKind].sort((a, b) => b[1] - a[1]))
    if (seconds > 0) parts.push({ name: `${KIND_WORDS[kind] || kind}, exposed`, seconds, className: kind, go: { kind } });
  if (bubble) parts.push({ name: "bubble", seconds: bubble, className: "bubble", go: {} });
  const total = parts.reduce((s, p) => s + p.seconds, 0) || 1;
  const bar = parts.map(p => h("button", {
    type: "button", class: `part ${p.className}`, style: `flex:${p.seconds / total} 1 0`,
    title: `${p.name}: ${secondsText(p.seconds)}, ${percentText(p.seconds / total)}`, onclick: () => Object.keys(p.go).length && select(p.go),
  }, h("span", { class: "long" }, `${p.name} ${percentText(p.seconds / total)}`), h("span", { class: "code" }, (MARKS[p.className] || { code: "" }).code)));
  return h("section", { "aria-label": "where the time goes" }, h("h2", {}, "Where the time goes"),
    h("div", { class: "bar" }, bar),
    h("p", { class: "legend soft" }, parts.map(p => h("span", {}, key(p.className), ` ${p.name} ${secondsText(p.seconds)}  `))));
}

/** The five rows that kernels wait for longest. */
function costliest(model, select) {
  const rows = model.data.rows, order = model.costliest;
  if (!order.length) return h("p", { class: "soft" }, "Nothing is sent.");
  const more = order.length > 5 ? h("p", { class: "soft" },
    `and ${order.length - 5} smaller, ${secondsText(order.slice(5).reduce((s, r) => s + r.seconds, 0))} in all: `,
    h("a", { href: "#table" }, "all collectives")) : null;
  return h("section", { class: "costliest" }, h("h2", {}, "The costliest collectives", h("small", { class: "soft" }, " by the share of the step that waits for them")),
    h("ol", {}, order.slice(0, 5).map(r => h("li", {},
      h("button", { type: "button", class: "row", onclick: () => select({ row: r.row }) },
        h("span", { class: "share" }, percentText(r.exposed / model.step)),
        pill(rows.kind[r.row]),
        h("span", { class: "what" }, r.times > 1 ? `${r.times} × ` : "", rows.tensor[r.row], r.more ? `, in a message with ${r.more} more` : "",
          h("small", { class: "mono soft" }, ` ${rows.before[r.row]} → ${rows.after[r.row]}`)),
        h("span", { class: "n" }, bytesText(r.bytes)),
        h("span", { class: "n" }, secondsText(r.seconds)),
        h("span", { class: "mono soft where" }, rows.line[r.row]))))), more);
}
