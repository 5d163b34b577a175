// Two plans side by side: what changed, by the time that it gains.
"use strict";

const signed = (x, text) => (x === 0 ? "0" : `${x > 0 ? "+" : "−"}${text(Math.abs(x))}`);

function diffClaim(model, select) {
  const d = model.data.diff, [a, b] = d.figures;
  const line = (name, key, text) => {
    const x = a[key], y = b[key], change = x === y ? "same" : x ? `${signed((y - x) / x, percentText)}` : "new";
    return h("tr", {}, h("th", { scope: "row" }, name), h("td", { class: "n" }, text(x)), h("td", { class: "n" }, text(y)),
      h("td", { class: `n ${y < x ? "good" : y > x ? "bad" : ""}` }, change));
  };
  return h("header", { class: "claim diff" }, h("h1", {}, `${d.names[0]} → ${d.names[1]}`),
    h("p", { class: "soft" }, h("b", {}, d.names[0]), ` ${d.plans[0]}`, h("br"), h("b", {}, d.names[1]), ` ${d.plans[1]}`),
    h("table", { class: "figures-table" }, h("thead", {}, h("tr", {}, ["", ...d.names, "change"].map(t => h("th", {}, t)))), h("tbody", {},
      line("step", "step_seconds", secondsText), line("one thing after the other", "serial_seconds", secondsText), line("communication exposed", "exposed_seconds", secondsText),
      line("sent per device", "wire_bytes", bytesText), line("collectives", "count", String), line("memory per device", "memory_bytes", bytesText),
      h("tr", {}, h("th", { scope: "row" }, "plan"), d.verdicts.map(v => h("td", {}, v)), h("td")))),
    diffRows(model, select), diffSignatures(d));
}

function diffRows(model, select) {
  const r = model.data.diff.rows;
  if (!r.kind.length) return h("p", {}, "Both send the same.");
  const rowOf = k => model.data.rows.kind.findIndex((kind, i) => kind === r.kind[k] && model.data.rows.line[i] === r.line[k] && model.data.rows.before[i] === r.before[k]
    && model.data.rows.after[i] === r.after[k] && model.data.rows.type[i] === r.type[k]);
  return h("section", {}, h("h2", {}, "What is sent otherwise, by the time that it gains or costs"), h("div", { class: "scroll" }, h("table", { class: "rows diff-rows" },
    h("thead", {}, h("tr", {}, ["", "time", "collective", "×", "tensor", "before → after", "over", "sent", "line", "why"].map(t => h("th", {}, t)))),
    h("tbody", {}, r.kind.map((kind, k) => h("tr", { class: r.change[k], onclick: () => { const i = rowOf(k); if (i >= 0) select({ row: i }); } },
      h("td", {}, h("span", { class: `change ${r.change[k]}` }, `${CHANGE_SIGNS[r.change[k]]} ${r.change[k]}`)), h("td", { class: "n" }, h("button", { type: "button", class: "link" }, signed(r.seconds[k], secondsText))),
      h("td", {}, pill(kind)), h("td", { class: "n" }, signed(r.times[k], String)), h("td", {}, r.tensor[k], h("br"), h("span", { class: "mono soft" }, r.type[k])),
      h("td", { class: "mono" }, `${r.before[k]} → ${r.after[k]}`), h("td", {}, r.over[k]), h("td", { class: "n" }, signed(r.bytes[k], bytesText)), h("td", { class: "mono" }, r.line[k]), h("td", { class: "c-reason" }, r.reason[k])))))));
}

function diffSignatures(d) {
  const s = d.signatures;
  if (!s.path.length) return h("p", { class: "soft" }, "All arguments and results lie as before.");
  return h("section", {}, h("h2", {}, "Arguments and results with other signatures"), h("table", {}, h("tbody", {}, s.path.map((path, k) => h("tr", {}, h("td", { class: "soft" }, s.title[k]),
    h("td", { class: "mono" }, path), h("td", { class: "mono" }, `${s.before[k] || "nothing"} → ${s.after[k] || "nothing"}`))))));
}
