// The graph: what is open, drawn by cytoscape, laid out in a worker.
"use strict";

class GraphView {
  constructor(model, element, onSelect) {
    this.model = model;
    this.element = element;
    this.onSelect = onSelect;
    this.open = this.first();
    this.hidden = new Set();
    this.jobs = 0;
    const source = [...document.querySelectorAll("script[data-worker]")].map(s => s.textContent).join("\n");
    this.worker = new Worker(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
    this.worker.onmessage = e => { if (e.data.id === this.jobs) this.draw(e.data.places); };
    this.cy = cytoscape({
      container: element.querySelector(".canvas"), style: [], elements: [],
      minZoom: 0.02, maxZoom: 3, autoungrabify: true, boxSelectionEnabled: false, hideEdgesOnViewport: true,
    });
    this.cy.on("tap", "node", e => this.onSelect({ node: Number(e.target.id()) }));
    this.cy.on("tap", "edge", e => this.onSelect({ edge: e.target.data("one") }));
    this.cy.on("tap", e => { if (e.target === this.cy) this.onSelect({}); });
    this.cy.on("dbltap", "node", e => this.toggle(Number(e.target.id())));
    this.cy.on("zoom", () => {
      // Labels are made once the zoom rests, or is far from what they were made for.
      clearTimeout(this.resting);
      this.resting = setTimeout(() => this.relabel(), 60);
    });
    this.map = new MiniMap(this.cy, element.querySelector(".minimap"));
    new ResizeObserver(() => { this.cy.resize(); this.map.draw(); }).observe(element);
  }

  /** What is open at first: phases, and placements where there are few. */
  first() {
    const m = this.model, open = new Set([0]), places = m.groups.kind.filter(k => k === "place").length;
    for (let v = 1; v < m.nGroups; v++)
      if (m.groups.kind[v] === "place" ? places <= 2 : m.groups.kind[v] === "phase") open.add(v);
    // In a page of two plans all that is different is seen, the costliest first, as far as there is room.
    const different = m.changes ? Array.from({ length: m.n - m.nGroups }, (_, k) => m.nGroups + k).filter(v => m.change(v) !== "same") : [];
    for (const v of different.sort((a, b) => m.seconds(b) - m.seconds(a)).slice(0, MOST_SHOWN)) m.around(v).forEach(g => open.add(g));
    return open;
  }

  toggle(v) {
    if (!this.model.opens(v)) return Promise.resolve();
    if (this.open.has(v)) this.open.delete(v); else this.open.add(v);
    this.anchor = v;
    return this.refresh();
  }

  /** Opens all around a node, so that it is seen, and goes there. */
  async reveal(v) {
    this.model.around(v).forEach(g => { this.open.add(g); this.hidden.delete(g); });
    await this.refresh();
    this.mark(v);
    const node = this.cy.$id(String(v));
    if (node.nonempty()) this.cy.animate({ center: { eles: node }, zoom: Math.max(this.cy.zoom(), 0.8), duration: 150 });
  }

  mark(v) {
    this.cy.$(".marked").removeClass("marked");
    if (v) this.cy.$id(String(v)).addClass("marked");
  }

  /** Lays out what is seen, and draws it when that is done. */
  refresh() {
    const m = this.model, { shown, nodes } = m.visible(this.open, this.hidden);
    this.seen = nodes;
    this.seenEdges = m.visibleEdges(shown);
    const phaseOf = v => { const p = m.phase(v); return p < 0 ? "" : m.groups.title[p]; };
    const job = {
      id: ++this.jobs,
      nodes: nodes.map(v => ({ id: v, parent: m.parent(v), ...this.size(v), phase: phaseOf(v), kind: m.kind(v) })),
      edges: this.seenEdges.map(e => [e.from, e.to, e.next]),
    };
    return new Promise(done => { this.done = done; this.worker.postMessage(job); });
  }

  size(v) {
    const m = this.model;
    if (m.isSent(v)) {
      // The area says the time, of the costliest most.
      const most = Math.max(...m.sent.seconds, 1e-12), part = m.sent.seconds[v - m.nGroups] / most;
      return { w: 96 + 110 * Math.sqrt(part), h: 34 + 40 * Math.sqrt(part) };
    }
    return { w: 196, h: 58 };
  }

  /** What stands in a box, and how large: never below 11 px on the screen. What has no room then is left out. */
  label(v, w, height, zoom = this.cy.zoom()) {
    const m = this.model, z = Math.max(zoom, 0.01), isOpen = this.open.has(v);
    const size = Math.max(SMALLEST_PX / z, isOpen ? 14 : 12);
    const room = Math.floor((w * z - (m.isSent(v) ? 26 * z : 10)) / (LETTER * size * z)), lines = isOpen ? 1 : Math.floor((height * z - 2) / (1.25 * size * z));
    if (room < 2 || lines < 1 || (isOpen && size > 30)) return { label: "", size: 12 };
    const cut = t => (t.length > room ? `${t.slice(0, room - 1)}…` : t), fits = texts => texts.find(t => t.length <= room) || cut(texts[texts.length - 1]);
    const time = secondsText(m.seconds(v)), share = m.step > 0 ? percentText(m.seconds(v) / m.step) : "";
    if (m.isSent(v)) {
      const k = v - m.nGroups, sign = CHANGE_SIGNS[m.change(v)], code = MARKS[m.kind(v)].code, times = m.sent.count[k] > 1 ? ` ×${m.sent.count[k]}` : "";
      const word = m.change(v) === "same" ? "" : `${m.change(v)} `, said = secondsText(m.sent.seconds[k]);
      const heads = lines > 1 ? [word + m.title(v), sign + m.title(v), sign + code + times, sign + code] : [`${sign}${code}${times} ${said}`, sign + code + times, sign + code];
      return { label: [fits(heads), ...(lines > 1 ? [fits([`${bytesText(m.sent.bytes[k])} · ${said}`, said, ""])] : [])].join("\n"), size };
    }
    const times = m.groups.times[v] > 1 ? ` ×${m.groups.times[v]}` : "", changes = m.changes ? m.changes[v] : "";
    const tail = times + (!isOpen && m.opens(v) ? " ▸" : ""), free = Math.max(3, room - tail.length), title = m.title(v);
    const head = (title.length > free ? `${title.slice(0, free - 1)}…` : title) + tail;
    if (isOpen) return { label: fits([`${head}   ${time} · ${share}${changes && `   ${changes}`}`, `${head}  ${share}${changes && `  ${changes}`}`, `${head}${changes && ` ${changes}`}`, head]), size };
    const more = [...(changes ? [changes] : []), ...(lines > 2 ? [cut(m.groups.where[v])] : []), fits([`${time} · ${share}`, time])];
    return { label: [head, ...more].slice(0, lines).join("\n"), size };
  }

  /** Labels anew after the zoom has changed. */
  relabel() {
    this.zoomed = this.cy.zoom();
    this.cy.batch(() => this.cy.nodes().forEach(n => { n.data(this.label(Number(n.id()), n.data("w"), n.data("h"))); }));
  }

  draw(places) {
    const m = this.model, before = this.anchor === undefined ? null : this.cy.$id(String(this.anchor));
    const kept = before && before.nonempty() ? before.renderedBoundingBox({ includeLabels: false }) : null;
    const deep = [...places].sort((a, b) => m.around(a[0]).length - m.around(b[0]).length);
    const elements = deep.map(([v, x, y, w, height]) => ({
      group: "nodes",
      data: { id: String(v), label: "", size: 12, w, h: height },
      classes: [m.isSent(v) ? `sent ${m.kind(v)}` : this.open.has(v) ? "open" : m.opens(v) ? "closed" : "leaf",
        m.isSent(v) ? m.change(v) : m.kind(v)].join(" "),
      position: { x, y },
    }));
    const most = Math.max(...this.seenEdges.map(e => e.bytes), 1);
    for (const e of this.seenEdges) elements.push({
      group: "edges",
      data: { id: e.key, source: String(e.from), target: String(e.to), width: 1 + 5 * Math.sqrt(e.bytes / most), one: e },
      classes: [e.next ? "next" : "", [e.from, e.to].some(v => m.isSent(v) && m.change(v) === "removed") ? "gone" : "", m.phase(e.from) !== m.phase(e.to) ? "across" : ""].join(" "),
    });
    this.cy.batch(() => {
      this.cy.elements().remove();
      this.cy.add(elements);
      this.cy.style(graphStyle());
    });
    this.edgesBehind();
    const after = this.anchor === undefined ? null : this.cy.$id(String(this.anchor));
    if (kept && after.nonempty()) {
      const now = after.renderedBoundingBox({ includeLabels: false });
      this.cy.panBy({ x: kept.x1 - now.x1, y: kept.y1 - now.y1 });
    } else this.fit();
    this.relabel();
    this.anchor = undefined;
    this.map.draw();
    if (this.done) this.done();
  }

  /** Open groups below, then edges, then what is in the groups. */
  edgesBehind() {
    const m = this.model;
    this.cy.nodes().forEach(n => { n.style("z-index", this.open.has(Number(n.id())) ? m.around(Number(n.id())).length : 100); });
    this.cy.edges().style("z-index", 50);
  }

  fit() {
    // In a page of two plans first what is different.
    const different = this.cy.nodes(".added, .removed, .changed");
    const first = !this.fitted, apart = first && different.nonempty();
    this.cy.fit(apart ? different : undefined, first ? 40 : 24);
    this.fitted = true;
    if (this.cy.zoom() > 1.1) { this.cy.zoom(1.1); this.cy.center(); }
    // At first boxes can be read, from the top of the forward pass on; the button shows all of them.
    if (first && !apart && this.cy.zoom() < READABLE) {
      const corner = this.cy.elements().boundingBox();
      this.cy.viewport({ zoom: READABLE, pan: { x: 24 - corner.x1 * READABLE, y: 24 - corner.y1 * READABLE } });
    }
  }
  restyle() { this.cy.style(graphStyle()); this.edgesBehind(); this.map.draw(); }
}

const MOST_SHOWN = 5; // differences that are open at first
const READABLE = 0.55; // the zoom from which on a box has its name and its time
const SMALLEST_PX = 11, LETTER = 0.56; // of a letter's height, what it is wide

const cssColour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function graphStyle() {
  const c = cssColour, font = c("--font").replaceAll('"', "");
  const sent = Object.entries(MARKS).map(([kind, mark]) => ({
    selector: `node.sent.${kind}`, style: { "background-color": mark.fill, "border-color": mark.border, color: INK },
  }));
  return [
    { selector: "node", style: {
      shape: "round-rectangle", width: "data(w)", height: "data(h)", label: "data(label)", "text-wrap": "wrap",
      "text-valign": "center", "text-halign": "center", "font-size": "data(size)", "font-family": font, color: c("--ink"),
      "background-color": c("--card"), "border-width": 1.2, "border-color": c("--edge"), "line-height": 1.25,
      "z-index-compare": "manual", "min-zoomed-font-size": 9,
    } },
    { selector: "node.closed", style: { "border-width": 2 } },
    { selector: "node.open", style: {
      "text-valign": "top", "text-margin-y": 24, "font-weight": "bold", "background-color": c("--ground"),
      "border-color": c("--line"), "background-opacity": 0.9,
    } },
    { selector: "node.open.phase", style: { "background-color": c("--lane") } },
    { selector: "node.sent", style: { shape: "round-hexagon", "border-width": 2 } },
    ...sent,
    { selector: "edge", style: {
      width: "data(width)", "line-color": c("--edge"), "target-arrow-color": c("--edge"), "curve-style": "bezier",
      "target-arrow-shape": "triangle", "arrow-scale": 0.8, opacity: 0.75, "z-index-compare": "manual",
    } },
    { selector: "edge.next", style: { "line-style": "dashed", opacity: 0.4 } },
    { selector: "edge.gone", style: { "line-style": "dotted", opacity: 0.6 } },
    { selector: "edge.across", style: { opacity: 0.22 } },
    { selector: ".marked", style: { "border-color": c("--mark"), "border-width": 4, "line-color": c("--mark"),
      "target-arrow-color": c("--mark"), opacity: 1 } },
    { selector: "node.added", style: { "border-width": 5, "border-style": "double" } },
    { selector: "node.removed", style: { "border-style": "dashed", "border-width": 3, "background-opacity": 0.25, color: c("--ink") } },
    { selector: "node.changed", style: { "border-width": 4 } },
    { selector: ".dim", style: { opacity: 0.25 } },
  ];
}

/** The whole graph small, with a frame for what is seen; a click goes there. */
class MiniMap {
  constructor(cy, canvas) {
    this.cy = cy;
    this.canvas = canvas;
    cy.on("viewport", () => this.draw());
    const go = e => {
      if (!this.scale || (e.type === "pointermove" && !(e.buttons & 1))) return;
      const r = canvas.getBoundingClientRect();
      const x = (e.clientX - r.left - this.left) / this.scale + this.box.x1;
      const y = (e.clientY - r.top - this.top) / this.scale + this.box.y1;
      const z = cy.zoom();
      cy.pan({ x: cy.width() / 2 - x * z, y: cy.height() / 2 - y * z });
    };
    canvas.addEventListener("pointerdown", go);
    canvas.addEventListener("pointermove", go);
  }

  draw() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => { this.waiting = false; this.paint(); });
  }

  paint() {
    const { cy, canvas } = this, nodes = cy.nodes(), w = canvas.clientWidth, height = canvas.clientHeight;
    if (!nodes.length || !w) return;
    const dpr = window.devicePixelRatio || 1, g = canvas.getContext("2d");
    canvas.width = w * dpr; canvas.height = height * dpr;
    g.scale(dpr, dpr);
    const box = this.box = nodes.boundingBox({ includeLabels: false });
    const s = this.scale = Math.min((w - 8) / box.w, (height - 8) / box.h);
    this.left = (w - s * box.w) / 2; this.top = (height - s * box.h) / 2;
    nodes.forEach(n => {
      const p = n.position();
      g.fillStyle = n.style("background-color");
      g.strokeStyle = n.style("border-color");
      const a = [this.left + s * (p.x - n.width() / 2 - box.x1), this.top + s * (p.y - n.height() / 2 - box.y1),
        Math.max(1, s * n.width()), Math.max(1, s * n.height())];
      g.fillRect(...a);
      g.lineWidth = 0.5;
      g.strokeRect(...a);
    });
    const e = cy.extent();
    g.strokeStyle = cssColour("--mark");
    g.lineWidth = 1.5;
    g.strokeRect(this.left + s * (e.x1 - box.x1), this.top + s * (e.y1 - box.y1), s * e.w, s * e.h);
  }
}
