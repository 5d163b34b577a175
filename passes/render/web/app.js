// Puts the page together: the claim, the graph with its panel, and the tables.
"use strict";

function start() {
  const model = new PlanModel(JSON.parse(document.getElementById("plan-data").textContent));
  besideColumns(model);
  const root = document.getElementById("app"), hasGraph = model.nGroups > 1;
  document.getElementById("loading")?.remove();
  const select = what => choose(what);
  root.append(model.data.diff ? diffClaim(model, select) : claim(model, select));
  let view = null, detail = null, tree = null;
  if (hasGraph) {
    const canvas = h("div", { class: "graph" }, h("div", { class: "canvas", role: "img", "aria-label": "the program as a graph; the outline has the same as a list" }),
      h("canvas", { class: "minimap", "aria-hidden": "true" }));
    const panel = h("aside", { class: "detail", "aria-live": "polite", tabindex: -1 }), outline = h("ul", { class: "outline", role: "tree", "aria-label": "outline" });
    root.append(h("section", { class: "program" }, h("h2", {}, "The program"), toolbar(model, () => view, select),
      h("div", { class: "split" }, h("details", { class: "tree", open: window.innerWidth > 1100 }, h("summary", {}, "outline"), outline), canvas, panel)));
    view = new GraphView(model, canvas, select);
    detail = new Detail(model, panel, select);
    tree = new Tree(model, outline, view, select);
    detail.show({});
    view.refresh().then(() => { document.documentElement.dataset.ready = "1"; });
  }
  const table = new RowTable(model, select), all = model.data.timelines || [];
  const timelines = all.length ? new Timelines(all, select) : null, below = tabs(model, table, select, timelines);
  root.append(below.element);
  if (!hasGraph) document.documentElement.dataset.ready = "1";

  /** Shows what was clicked, everywhere: graph, panel, table and outline. */
  async function choose(what) {
    if (what.toggle !== undefined) { await view.toggle(what.toggle); tree.fill(); return; }
    if (what.kind) what = { row: model.costliest.find(r => model.data.rows.kind[r.row] === what.kind).row };
    const places = what.row === undefined ? [] : model.placesOf.get(what.row) || [];
    const rows = what.rows || (what.row !== undefined ? [what.row] : what.node !== undefined && model.isSent(what.node) ? model.sent.rows[what.node - model.nGroups] : []);
    table.mark(rows);
    if (timelines) {
      const part = what.node !== undefined && !model.isSent(what.node) ? what.node : -1;
      model.timed = timelines.mark(rows, g => g === part || model.around(g).includes(part));
      if (what.in === "Timeline") { below.show("Timeline"); timelines.reveal(); }
    }
    if (what.in === "Collectives") { below.show("Collectives"); table.reveal(); }
    if (!view) return;
    detail.show(what);
    const node = what.node !== undefined ? what.node : places[0];
    if (node !== undefined) { await view.reveal(node); tree.fill(node); }
    else if (what.edge) { view.mark(0); view.cy.$id(what.edge.key).addClass("marked"); } else view.mark(0);
  }
  printing(view, timelines);
  window.sbpPage = { model, view, timelines, select: choose };
}

/** Search, phases, and what the graph does. */
function toolbar(model, view, select) {
  const found = h("ul", { class: "found", role: "listbox", hidden: true });
  const all = searchable(model);
  const input = h("input", { type: "search", placeholder: "search: a parameter, a line, a collective", "aria-label": "search the plan",
    oninput: () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      const hits = words.length ? all.filter(s => words.every(w => s.text.includes(w))).slice(0, 20) : [];
      found.hidden = !words.length;
      found.replaceChildren(...(hits.length ? hits.map(s => h("li", { role: "option" }, h("button", { type: "button", onclick: () => { found.hidden = true; select(s.what); } },
        h("small", { class: "soft" }, `${s.kind} `), s.name))) : [h("li", { class: "soft" }, "nothing is called so")]));
    },
    onkeydown: e => { if (e.key === "Enter") found.querySelector("button")?.click(); if (e.key === "Escape") found.hidden = true; } });
  const phases = [];
  for (let v = 1; v < model.nGroups; v++) if (["phase", "place"].includes(model.groups.kind[v]) && model.groups.parent[v] === 0) phases.push(v);
  const boxes = phases.length > 1 ? phases.map(v => h("label", {}, h("input", { type: "checkbox", checked: true,
    onchange: e => { if (e.target.checked) view().hidden.delete(v); else view().hidden.add(v); view().refresh(); } }), ` ${model.groups.title[v]}`)) : [];
  const act = (name, what) => h("button", { type: "button", onclick: what }, name);
  const zoom = by => { const cy = view().cy; cy.zoom({ level: cy.zoom() * by, renderedPosition: { x: cy.width() / 2, y: cy.height() / 2 } }); };
  return h("div", { class: "toolbar" }, h("div", { class: "search" }, input, found), ...boxes,
    act("fit", () => view().fit()), act("+", () => zoom(1.3)), act("−", () => zoom(1 / 1.3)),
    act("close all", () => { const v = view(); v.open = v.first(); v.refresh(); }),
    act("theme", () => switchTheme(view())));
}

/** Everything that has a name. */
function searchable(model) {
  const rest = model.data.at_rest, rows = model.data.rows, found = [];
  rest.path.forEach((path, k) => found.push({ kind: rest.kind[k], name: path, text: `${path} ${rest.kind[k]}`.toLowerCase(), what: { rest: k, node: undefined } }));
  rows.kind.forEach((kind, k) => found.push({ kind: KIND_WORDS[kind] || kind, name: `${rows.tensor[k]} at ${rows.line[k]}`,
    text: `${KIND_WORDS[kind]} ${rows.tensor[k]} ${rows.line[k]}`.toLowerCase(), what: { row: k } }));
  for (let v = 1; v < model.nGroups; v++) found.push({ kind: model.groups.kind[v], name: `${model.groups.title[v]} (${model.groups.where[v]})`,
    text: `${model.groups.title[v]} ${model.groups.where[v]}`.toLowerCase(), what: { node: v } });
  const t = model.data.tensors || { name: [] };
  t.name.forEach((name, k) => found.push({ kind: "tensor", name: `${name} ${typeText(t.dtype[k], t.shape[k])} ${t.sbp[k]}`, text: name.toLowerCase(), what: { tensor: k } }));
  return found;
}

function switchTheme(view) {
  const root = document.documentElement, dark = cssColour("--is-dark") === "1";
  root.dataset.theme = dark ? "light" : "dark";
  if (view) view.restyle();
}

/** The same as the graph, as a tree that keys can go through. */
class Tree {
  constructor(model, element, view, select) {
    Object.assign(this, { model, element, view, select });
    element.addEventListener("keydown", e => this.key(e));
    this.fill();
  }

  fill(chosen) {
    if (chosen !== undefined) this.chosen = chosen;
    const m = this.model, { nodes } = m.visible(this.view.open, this.view.hidden);
    const focused = this.element.contains(document.activeElement);
    this.element.replaceChildren(...nodes.map(v => h("li", { role: "treeitem", tabindex: v === (this.chosen ?? nodes[0]) ? 0 : -1, "data-node": v,
      "aria-level": m.around(v).length + 1, "aria-expanded": m.opens(v) ? String(this.view.open.has(v)) : null, "aria-selected": String(v === this.chosen),
      style: `padding-left:${0.4 + 0.8 * m.around(v).length}em`,
      onclick: () => this.select({ node: v }), ondblclick: () => this.select({ toggle: v }) },
      m.isSent(v) ? key(m.kind(v)) : h("span", { class: "twist", onclick: e => { e.stopPropagation(); this.chosen = v; this.select({ toggle: v }); } },
        m.opens(v) ? (this.view.open.has(v) ? "▾" : "▸") : "·"), " ", m.title(v), !m.isSent(v) && m.groups.times[v] > 1 ? ` ×${m.groups.times[v]}` : "",
      h("small", { class: "soft" }, ` ${secondsText(m.seconds(v))}`))));
    if (focused) this.element.querySelector('[tabindex="0"]')?.focus();
  }

  key(e) {
    const at = document.activeElement, v = Number(at.dataset?.node);
    const go = li => { if (!li) return; at.tabIndex = -1; li.tabIndex = 0; li.focus(); this.chosen = Number(li.dataset.node); };
    const open = this.view.open.has(v);
    const act = {
      ArrowDown: () => go(at.nextElementSibling), ArrowUp: () => go(at.previousElementSibling),
      ArrowRight: () => { if (this.model.opens(v) && !open) this.select({ toggle: v }); else go(at.nextElementSibling); },
      ArrowLeft: () => { if (open) this.select({ toggle: v }); else go(this.element.querySelector(`[data-node="${this.model.parent(v)}"]`)); },
      Enter: () => this.select({ node: v }), " ": () => this.select({ toggle: v }),
    }[e.key];
    if (act) { e.preventDefault(); act(); }
  }
}

/** A table of texts, the first row being its headings. */
function plainTable(t) {
  const [heads, ...rows] = t.rows, side = k => (t.numbers.includes(heads[k]) ? "n" : "");
  return h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, heads.map((x, k) => h("th", { class: side(k) }, x)))),
    h("tbody", {}, rows.map(row => h("tr", {}, row.map((x, k) => h("td", { class: side(k) }, x)))))));
}

/** Tables below the graph, one at a time. */
function tabs(model, table, select, timelines) {
  const rest = model.data.at_rest;
  const pages = [["Collectives", table.element]];
  pages.push(["At rest", h("div", { class: "scroll" }, h("table", { class: "rows" },
    h("thead", {}, h("tr", {}, ["", "path", "signature", "type"].map(t => h("th", {}, t)))),
    h("tbody", {}, rest.path.map((path, k) => h("tr", { onclick: () => select({ rest: k }) }, h("td", { class: "soft" }, rest.kind[k]),
      h("td", { class: "mono" }, h("button", { type: "button", class: "link" }, path)), h("td", { class: "mono" }, rest.sbp[k]), h("td", { class: "mono soft" }, rest.shape[k] ? typeText(rest.dtype[k], rest.shape[k]) : ""))))))]);
  for (const [title, make] of Object.entries(window.sbpPanels || {})) { const made = make(model, select, timelines); if (made) pages.push([title, made]); }
  for (const t of model.data.tables || []) pages.push([t.title, plainTable(t)]);
  if (model.data.notes.length) pages.push(["Notes", h("ul", {}, model.data.notes.map(n => h("li", {}, h("pre", { class: "note" }, n))))]);
  const heads = pages.map(([title], k) => h("button", { type: "button", role: "tab", id: `tab${k}`, "aria-controls": `panel${k}`, "aria-selected": String(k === 0), tabindex: k ? -1 : 0,
    onclick: () => show(k), onkeydown: e => { const to = { ArrowRight: k + 1, ArrowLeft: k - 1 }[e.key]; if (heads[to]) { show(to); heads[to].focus(); } } }, title));
  const bodies = pages.map(([, body], k) => h("div", { role: "tabpanel", id: `panel${k}`, "aria-labelledby": `tab${k}`, class: k ? "closed" : "" }, body));
  function show(k) {
    heads.forEach((x, i) => { x.setAttribute("aria-selected", String(i === k)); x.tabIndex = i === k ? 0 : -1; });
    bodies.forEach((x, i) => { x.classList.toggle("closed", i !== k); });
  }
  return { element: h("section", { class: "tabs", id: "table" }, h("div", { role: "tablist" }, heads), bodies), show: title => show(pages.findIndex(p => p[0] === title)) };
}

start();
