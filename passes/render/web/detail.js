// The panel beside the graph: a group, a collective, a tensor or what runs along an edge.
"use strict";

class Detail {
  constructor(model, element, select) { this.model = model; this.element = element; this.select = select; }

  show(what) {
    const content = what.tensor !== undefined ? this.tensor(what.tensor) : what.rest !== undefined ? this.atRest(what.rest)
      : what.edge ? this.edge(what.edge) : what.row !== undefined && what.node === undefined ? this.rowsOf([what.row], null)
      : what.node === undefined ? this.nothing()
      : this.model.isSent(what.node) ? this.rowsOf(this.model.sent.rows[what.node - this.model.nGroups], what.node) : this.group(what.node);
    this.element.replaceChildren(...[content].flat().filter(Boolean));
    this.element.scrollTop = 0;
  }

  nothing() {
    return [h("h2", {}, "Nothing chosen"), h("p", { class: "soft" },
      "Click a box to read what it is, twice to open it. Hexagons are collectives, as large as the time that they take; "
      + "edges are as wide as the bytes that they carry. Or search: a parameter, a line, a collective.")];
  }

  crumbs(v) {
    return h("nav", { class: "crumbs", "aria-label": "where it stands" },
      this.model.around(v).map(g => [this.link(this.model.groups.title[g], { node: g }), " › "]));
  }

  link(text, what) { return h("button", { type: "button", class: "link", onclick: () => this.select(what) }, text); }

  /** The user's line with the text around it. */
  source(where) {
    const said = this.model.lineText(where);
    if (!said || !said.text.length) return h("p", { class: "mono soft" }, where);
    const line = Number(where.slice(where.lastIndexOf(":") + 1));
    return h("figure", { class: "source" }, h("figcaption", { class: "mono soft" }, where, said.function ? ` in ${said.function}` : ""),
      h("pre", { tabindex: 0 }, said.text.map((text, k) =>
        h("span", { class: said.first + k === line ? "here" : "" }, `${String(said.first + k).padStart(4)}  ${text}\n`))));
  }

  facts(pairs) {
    return h("dl", { class: "facts" }, pairs.filter(([, v]) => v !== null && v !== "").map(([k, v]) => [h("dt", {}, k), h("dd", {}, v)]));
  }

  devices(shape, sbp, place) {
    const on = this.model.data.places[place];
    return on ? deviceDrawing(shape, sbp, on.mesh, on.axes) : null;
  }

  group(v) {
    const m = this.model, g = m.groups, leafs = this.leaves(v);
    const tensors = leafs.flatMap(l => m.tensorsOf.get(l) || []).sort((a, b) => m.data.tensors.bytes[b] - m.data.tensors.bytes[a]).slice(0, 24);
    const places = this.places(v).sort((a, b) => m.seconds(b) - m.seconds(a)).slice(0, 12);
    return [
      this.crumbs(v), h("h2", {}, g.title[v], g.times[v] > 1 ? h("small", {}, ` ×${g.times[v]}, all alike`) : ""),
      this.facts([["kernels", `${secondsText(g.seconds[v])}, ${percentText(g.seconds[v] / m.step)} of the step`], besideGroup(m, v),
        ["collectives", m.sentSeconds[v] ? `${secondsText(m.sentSeconds[v])}, ${secondsText(m.exposed[v])} exposed` : "none"],
        ["ops", String(g.ops[v])], ["lines", g.where[v]]]),
      h("p", { class: "leads" }, m.opens(v) ? h("button", { type: "button", onclick: () => this.select({ toggle: v }) }, "open or close") : null, " ",
        m.timed ? this.link("in the timeline", { node: v, in: "Timeline" }) : null),
      places.length ? h("h3", {}, "Collectives") : null,
      h("ul", { class: "plain" }, places.map(p => h("li", {}, pill(m.kind(p)), " ",
        this.link(`${m.data.rows.tensor[m.sent.rows[p - m.nGroups][0]]}, ${bytesText(m.sent.bytes[p - m.nGroups])}, ${secondsText(m.seconds(p))}`, { node: p })))),
      g.kind[v] === "line" ? this.source(g.where[v]) : null,
      tensors.length ? h("h3", {}, "Tensors made here, the largest") : null, this.tensors(tensors),
    ];
  }

  tensors(list) {
    const t = this.model.data.tensors;
    return h("ul", { class: "plain" }, list.map(k => h("li", {}, this.link(t.name[k], { tensor: k }),
      h("span", { class: "mono soft" }, ` ${typeText(t.dtype[k], t.shape[k])} ${t.sbp[k]} ${bytesText(t.bytes[k])}`))));
  }

  leaves(v) { return this.model.inside[v].length ? this.model.inside[v].flatMap(c => this.leaves(c)) : [v]; }
  places(v) { return this.model.isSent(v) ? [v] : this.model.inside[v].flatMap(c => this.places(c)); }

  rowsOf(rows, node) {
    const m = this.model, r = m.data.rows;
    const at = node === null ? (m.placesOf.get(rows[0]) || [])[0] : node;
    return [at === undefined ? null : this.crumbs(at), ...rows.map(k => h("section", { class: "collective" },
      h("h2", {}, pill(r.kind[k]), " ", r.tensor[k]),
      h("p", {}, r.reason[k]),
      m.hasTime(k) ? h("p", { class: "leads" }, this.link("in the timeline", { row: k, node: node ?? undefined, in: "Timeline" }), " · ", this.link("in the table", { row: k, node: node ?? undefined, in: "Collectives" })) : null,
      this.facts([["tensor", h("span", { class: "mono" }, r.type[k])], ["lies", h("span", { class: "mono" }, `${r.before[k]} → ${r.after[k]}`)],
        ["over", r.over[k]], ["times", `${r.times[k]} per step`], ["sent", `${bytesText(r.bytes[k])} per device and step`],
        ["time", `${secondsText(r.seconds[k])}, ${percentText(r.seconds[k] / m.step)} of the step`],
        ["exposed", `${secondsText(r.exposed[k])}: kernels wait so long`], ...besideRow(m, k)]),
      this.source(r.line[k]),
      h("h3", {}, "Before and after"), this.devices(r.shape[k], r.before[k], r.place[k]), this.devices(r.shape[k], r.after[k], r.place[k]), this.alternatives(r.tensor[k], r.line[k], r.after[k], k)))];
  }

  /** What the plan has looked at for a row, or for a tensor. */
  known(row, name, line) {
    const rows = this.model.data.rows, all = this.model.data.choices || [], bare = t => t.replace(/\[\d+\]/g, "[*]");
    const keyOf = k => [rows.names[k], rows.kind[k], rows.tensor[k], rows.line[k]].join(" ");
    if (row !== undefined) return all.filter(c => c.row === keyOf(row));
    return all.filter(c => (c.hold === "annotate" ? c.where === line && c.tensor.startsWith(`${name}, `) : c.where === name || bare(c.where) === bare(name))).slice(0, 1);
  }

  /** What to write to have a tensor lie otherwise. */
  write(how, where, nd, tensor = "") {
    const what = tensor.includes(", made at ") ? `the ${tensor.split(", made at ")[0]}` : "what it computes there";
    const code = (text, more) => h("code", { "data-where": where, "data-sbp": nd, ...more }, text);
    return { in_sbp: () => [code(`in_sbp: ${nd}`), ` for ${where}, as sbp.compile is given it`], out_sbp: () => [code(`out_sbp: ${nd}`), ` for ${where}, as sbp.compile is given it`],
      annotate: () => [code(`sbp.annotate(…, ${nd})`), ` at ${where}, around ${what}`],
      gradient: () => [code(`sbp.annotate(…, ${nd})`), ` on the gradient of ${where}, where jax.grad has returned it`],
      backward: () => ["nothing: the backward pass makes it, and no line of yours does. ", code(`plan.what_if(…, ${nd})`), " shows that plan"] }[how]();
  }

  /** What else it could lie as, and what removes a collective: what the plan has looked at, else how to ask. */
  alternatives(name, line, nd, row) {
    const asked = this.model.data.at_rest.path.includes(name) ? name : line, found = this.known(row, name, line);
    const ask = h("p", { class: "soft" }, found.length ? "More of them: " : "This page was written without the alternatives of this tensor. To see them, each with the whole plan made again: ",
      h("code", {}, `print(plan.why(${JSON.stringify(asked)}))`), found.length ? "" : [", or ", h("code", {}, 'plan.save("plan.html", choices=40, time_limit=300)'), " for those of the 40 costliest collectives"], ".");
    return [row === undefined || !found.length ? null : this.advice(found), h("h3", {}, "Alternatives"), found.map(c => this.choices(c)), ask];
  }

  /** By how much the step of an alternative is longer, or shorter. */
  change(c, now) { return c.chosen ? secondsText(c.seconds) : Math.abs(c.seconds - now.seconds) < 1e-6 * now.seconds ? "the same" : signed(c.seconds - now.seconds, secondsText); }

  /** What to write to do without a collective: what was looked for, else what was found among alternatives. */
  advice(found) {
    const removal = (this.model.data.removals || []).find(r => r.row === found[0].row);
    if (removal) return this.removal(removal);
    const gone = found.flatMap(f => f.rows.filter(c => c.gone).map(c => [f, c])).sort((a, b) => a[1].seconds - b[1].seconds)[0];
    if (!gone) return h("section", { class: "advice" }, h("h3", {}, "To remove it"), h("p", {}, `No signature of ${found.map(f => f.tensor).join(" or ")} that was looked at removes it.`));
    const [f, c] = gone;
    return h("section", { class: "advice" }, h("h3", {}, "To remove it"), h("p", {}, "Write ", this.write(f.hold, f.where, c.sbp),
      `. The step then takes ${secondsText(c.seconds)} (${this.change(c, f.rows[0])})`, c.instead ? `, with ${c.instead} instead` : "", c.fits ? "." : ", and does not fit."));
  }

  /** One tensor to hold, or two, and what the step takes then; or why none is known. */
  removal(r) {
    const head = h("h3", {}, "To remove it");
    if (!r.holds.length) return h("section", { class: "advice" }, head, h("p", {}, `Nothing was found that removes it: ${r.remark}.`,
      r.remark.startsWith("there was no time") ? [" To look longer: ", h("code", {}, 'plan.save("plan.html", time_limit=300)'), "."] : null));
    const both = r.holds.length > 1, difference = r.seconds - r.now, change = Math.abs(difference) < 1e-6 * r.now ? "the same" : signed(difference, secondsText);
    const write = r.holds.map((one, k) => h(both ? "li" : "p", {}, both ? "" : "Write ", this.write(one.hold, one.where, one.sbp, one.tensor), both && !k ? ", and" : "."));
    return h("section", { class: "advice" }, head, both ? [h("p", {}, "Write both (one of them alone was not found to do):"), h("ul", { class: "plain" }, write)] : write,
      h("p", {}, `The step then takes ${secondsText(r.seconds)} (${change})`, r.instead ? `, with ${r.instead} instead` : "", r.fits ? "." : ", and does not fit."),
      r.whole ? h("p", { class: "soft" }, "The whole program was planned again with it: the collective is gone.")
        : h("p", { class: "soft" }, "Found with the rest of the plan as it is; there was no time to plan the whole again. To be sure: ", h("code", {}, 'plan.save("plan.html", time_limit=300)'), "."));
  }

  /** The signatures that a tensor could have, with the whole plan made again around each. */
  choices(found) {
    const remark = c => [c.chosen ? "as planned" : "", c.gone ? "gone" : c.gone === false ? "still there" : "", c.instead && c.gone ? `${c.instead} instead` : "", c.fits ? "" : "does not fit"].filter(Boolean).join(", ");
    return [h("p", { class: "soft" }, `${found.tensor}${found.alike > 1 ? `, ${found.alike} alike, fixed together` : ""}, with another signature, and with ${found.near ? "what is near it" : "everything else"} planned again:`),
      h("div", { class: "scroll" }, h("table", { class: "small" }, h("thead", {}, h("tr", {}, ["signature", "step", "sent", "memory", ""].map((t, k) => h("th", { class: k && k < 4 ? "n" : "" }, t)))),
        h("tbody", {}, found.rows.map(c => h("tr", { class: c.chosen ? "marked" : "" }, h("td", { class: "mono" }, c.sbp), h("td", { class: "n" }, this.change(c, found.rows[0])),
          h("td", { class: "n" }, bytesText(c.bytes)), h("td", { class: "n" }, bytesText(c.memory)), h("td", { class: "soft" }, remark(c)))))))];
  }

  tensor(k) {
    const m = this.model, t = m.data.tensors, made = m.data.made.tensor.indexOf(k);
    const at = made < 0 ? null : m.data.made.group[made];
    const where = at === null ? "" : m.groups.where[at];
    return [at === null ? null : this.crumbs(at), h("h2", {}, t.name[k]),
      this.facts([["type", h("span", { class: "mono" }, typeText(t.dtype[k], t.shape[k]))], ["signature", h("span", { class: "mono" }, t.sbp[k])],
        ["a device", bytesText(t.bytes[k])], ["made at", at === null ? "" : this.link(where, { node: at })]]),
      this.devices(t.shape[k], t.sbp[k], t.place[k]),
      at === null ? null : this.source(where), this.alternatives(t.name[k], where, t.sbp[k])];
  }

  atRest(k) {
    const m = this.model, a = m.data.at_rest, nodes = a.nodes[k];
    return [h("h2", {}, a.path[k]), this.facts([[a.kind[k], "as it lies at rest"],
      ["type", h("span", { class: "mono" }, typeText(a.dtype[k], a.shape[k]))], ["signature", h("span", { class: "mono" }, a.sbp[k])],
      [a.kind[k] === "argument" ? "read by" : "made by", nodes.length ? h("ul", { class: "plain" }, nodes.slice(0, 12).map(v => h("li", {}, this.link(
        m.isSent(v) ? m.title(v) : `${m.groups.title[v]} (${m.groups.where[v]})`, { node: v })))) : ""]]),
      this.devices(a.shape[k], a.sbp[k], a.place[k]), this.alternatives(a.path[k], "", a.sbp[k])];
  }

  edge(e) {
    const m = this.model, list = [...new Set(e.parts.flatMap(k => m.edges.tensors[k]))].sort((a, b) => m.data.tensors.bytes[b] - m.data.tensors.bytes[a]);
    const count = e.parts.reduce((s, k) => s + m.edges.count[k], 0);
    return [h("h2", {}, `${m.title(e.from)} → ${m.title(e.to)}`),
      this.facts([["carries", `${count} tensor${count > 1 ? "s" : ""}, ${bytesText(e.bytes)} on a device`], ["from", this.link(m.title(e.from), { node: e.from })], ["to", this.link(m.title(e.to), { node: e.to })]]),
      this.tensors(list.slice(0, 30))];
  }
}
