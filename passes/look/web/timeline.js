// Timelines: lanes with what ran when, and what was held. Drawn on a canvas; wheel and buttons zoom, dragging moves.
"use strict";

const SPAN_COLOURS = {
  forward: ["#9fb8cf", "#52708c"], backward: ["#82a6c6", "#3d5f80"], update: ["#c3cfd9", "#6b7a89"],
  F: ["#9fcbe8", "#0072b2"], B: ["#f4b08f", "#c24e00"], I: ["#f3d48a", "#a87200"], W: ["#9bdcc4", "#007a5a"],
  SF: ["#56b4e9", "#2b7fb0"], SB: ["#c97fb1", "#a04d80"], kernel: ["#9fb8cf", "#52708c"], wait: ["#e7ebef", "#aab4be"],
};

class TimelineView {
  constructor(data, onPick) {
    this.data = data;
    this.onPick = onPick;
    this.from = 0;
    this.to = data.seconds;
    this.canvas = h("canvas", { class: "timeline", role: "img", tabindex: 0, "aria-label": `${data.name}: ${data.lanes.join(", ")}` });
    this.said = h("p", { class: "soft mono", "aria-live": "polite" }, "point at a box, or use the arrow keys, + and −");
    const act = (name, what) => h("button", { type: "button", onclick: what }, name);
    const bubble = data.bubble === undefined ? "" : `, bubble ${percentText(data.bubble)}`;
    this.element = h("figure", {}, h("figcaption", {}, h("b", {}, data.name), ` ${secondsText(data.seconds)}${bubble} `,
      act("all", () => this.show(0, data.seconds)), act("+", () => this.zoom(1 / 1.5)), act("−", () => this.zoom(1.5))), this.canvas, this.said);
    this.canvas.addEventListener("wheel", e => { if (!e.ctrlKey && !e.shiftKey && Math.abs(e.deltaX) < Math.abs(e.deltaY)) return; e.preventDefault(); this.zoom(e.deltaY > 0 ? 1.2 : 1 / 1.2, this.at(e)); }, { passive: false });
    this.canvas.addEventListener("pointermove", e => (e.buttons & 1 ? this.drag(e) : this.point(e)));
    this.canvas.addEventListener("click", e => { const k = this.hit(e); if (k >= 0 && this.onPick) this.onPick(this.data.spans, k); });
    this.canvas.addEventListener("keydown", e => {
      const w = this.to - this.from, act = { ArrowLeft: () => this.show(this.from - w / 5, this.to - w / 5), ArrowRight: () => this.show(this.from + w / 5, this.to + w / 5), "+": () => this.zoom(1 / 1.5), "-": () => this.zoom(1.5) }[e.key];
      if (act) { e.preventDefault(); act(); }
    });
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  at(e) { const r = this.canvas.getBoundingClientRect(); return this.from + (this.to - this.from) * Math.max(0, e.clientX - r.left - LABELS) / (r.width - LABELS); }
  show(from, to) {
    const width = Math.min(to - from, this.data.seconds);
    this.from = Math.max(0, Math.min(from, this.data.seconds - width));
    this.to = this.from + width;
    this.draw();
  }
  zoom(by, around = (this.from + this.to) / 2) { this.show(around - (around - this.from) * by, around + (this.to - around) * by); }
  drag(e) { const w = (this.to - this.from) * e.movementX / (this.canvas.clientWidth - LABELS); this.show(this.from - w, this.to - w); }

  lanes() {
    // Lanes of what is sent are half as high; those with nothing in them are left out.
    const used = new Set(this.data.spans.lane);
    let y = 4;
    return this.data.lanes.map((name, k) => {
      const height = !used.has(k) && /sends/.test(name) ? 0 : /sends/.test(name) ? 10 : 24, at = { y, height };
      y += height ? height + 4 : 0;
      return at;
    });
  }

  hit(e) {
    const r = this.canvas.getBoundingClientRect(), x = this.at(e), y = e.clientY - r.top, s = this.data.spans, lanes = this.lanes();
    for (let k = s.lane.length - 1; k >= 0; k--) {
      const lane = lanes[s.lane[k]];
      if (y >= lane.y && y <= lane.y + lane.height && x >= s.from[k] && x <= s.to[k]) return k;
    }
    return -1;
  }

  point(e) {
    const k = this.hit(e), s = this.data.spans;
    this.said.textContent = k < 0 ? "" : `${s.title[k]}: ${secondsText(s.from[k])} to ${secondsText(s.to[k])}, ${secondsText(s.to[k] - s.from[k])}`;
  }

  draw() {
    const { canvas, data } = this, lanes = this.lanes(), width = canvas.clientWidth, dpr = window.devicePixelRatio || 1;
    if (!width) return;
    const held = (data.held || []).filter(c => c.length), bottom = lanes.length ? lanes[lanes.length - 1].y + lanes[lanes.length - 1].height : 0;
    const total = bottom + held.length * 44 + 24;
    canvas.style.height = `${total}px`;
    canvas.width = width * dpr;
    canvas.height = total * dpr;
    const g = canvas.getContext("2d"), scale = (width - LABELS) / (this.to - this.from || 1), place = t => LABELS + (t - this.from) * scale;
    g.scale(dpr, dpr);
    g.font = "11px sans-serif";
    g.textBaseline = "middle";
    lanes.forEach((lane, k) => {
      g.fillStyle = cssColour("--ground");
      g.fillRect(LABELS, lane.y, width - LABELS, lane.height);
      g.fillStyle = cssColour("--soft");
      if (lane.height > 10) g.fillText(data.lanes[k], 0, lane.y + lane.height / 2);
    });
    g.save();
    g.beginPath();
    g.rect(LABELS, 0, width - LABELS, total);
    g.clip();
    this.spans(g, lanes, place);
    this.heldCurves(g, held, bottom, place, width);
    this.axis(g, place, bottom + held.length * 44, width);
    g.restore();
  }

  spans(g, lanes, place) {
    const s = this.data.spans, deepest = Math.max(...s.stage, 1);
    for (let k = 0; k < s.lane.length; k++) {
      if (s.to[k] < this.from || s.from[k] > this.to) continue;
      const lane = lanes[s.lane[k]], x = place(s.from[k]), w = Math.max(0.6, place(s.to[k]) - x), [fill, edge] = SPAN_COLOURS[s.kind[k]] || COLLECTIVE_COLOURS[s.kind[k]] || SPAN_COLOURS.kernel;
      g.globalAlpha = 1 - 0.35 * (s.stage[k] > 0 && lane.height > 10 ? s.stage[k] / deepest : 0);
      g.fillStyle = fill;
      g.fillRect(x, lane.y, w, lane.height);
      g.globalAlpha = 1;
      if (w > 3) { g.strokeStyle = edge; g.lineWidth = 0.8; g.strokeRect(x, lane.y, w, lane.height); }
      if (lane.height > 10 && w > 7 * s.label[k].length + 2) { g.fillStyle = "#1f2933"; g.textAlign = "center"; g.fillText(s.label[k], x + w / 2, lane.y + lane.height / 2); g.textAlign = "left"; }
    }
  }

  heldCurves(g, held, bottom, place, width) {
    const most = Math.max(...held.flat().map(p => p[1]), 1);
    held.forEach((points, k) => {
      const top = bottom + 8 + k * 44, base = top + 34;
      g.beginPath();
      g.moveTo(place(0), base);
      let last = 0;
      for (const [t, bytes] of points) { g.lineTo(place(t), base - 32 * last / most); g.lineTo(place(t), base - 32 * bytes / most); last = bytes; }
      g.lineTo(place(this.data.seconds), base - 32 * last / most);
      g.lineTo(place(this.data.seconds), base);
      g.fillStyle = cssColour("--held");
      g.globalAlpha = 0.45;
      g.fill();
      g.globalAlpha = 1;
      g.fillStyle = cssColour("--ink");
      const who = this.data.holder || `rank ${k}`, what = this.data.holder ? "" : " of micro-batches";
      g.fillText(`${who} holds at most ${bytesText(Math.max(...points.map(p => p[1])))}${what}`, LABELS + 6, top + 4);
    });
  }

  axis(g, place, y, width) {
    const span = this.to - this.from, raw = span / Math.max(2, (width - LABELS) / 110), power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map(m => m * power).find(x => x >= raw);
    g.fillStyle = cssColour("--soft");
    g.strokeStyle = cssColour("--line");
    for (let t = Math.ceil(this.from / step) * step; t <= this.to; t += step) {
      g.beginPath(); g.moveTo(place(t), 0); g.lineTo(place(t), y + 6); g.lineWidth = 0.5; g.stroke();
      g.fillText(secondsText(t), place(t) + 3, y + 12);
    }
  }
}

const LABELS = 84;

/** What a device holds from the first kernel to the last, against what it has. */
function memoryCurve(course, figures) {
  if (course.length < 2) return null;
  const NS = "http://www.w3.org/2000/svg", W = 900, H = 160, most = Math.max(...course), near = figures.capacity_bytes && figures.capacity_bytes < 3 * most;
  const top = near ? Math.max(figures.capacity_bytes, most) * 1.05 : most * 1.1, y = b => H - H * b / top;
  const svg = document.createElementNS(NS, "svg");
  for (const [k, v] of Object.entries({ viewBox: `0 0 ${W} ${H + 4}`, role: "img", class: "curve", preserveAspectRatio: "none" })) svg.setAttribute(k, v);
  const add = (name, attributes) => { const e = document.createElementNS(NS, name); for (const [k, v] of Object.entries(attributes)) e.setAttribute(k, v); svg.append(e); return e; };
  add("title", {}).textContent = `memory over the step: at most ${bytesText(most)}`;
  add("path", { class: "held", d: `M0,${H} ` + course.map((b, k) => `L${(W * k / (course.length - 1)).toFixed(1)},${y(b).toFixed(1)}`).join(" ") + ` L${W},${H} Z` });
  if (near) add("line", { x1: 0, x2: W, y1: y(figures.capacity_bytes), y2: y(figures.capacity_bytes), class: "limit" });
  return h("figure", {}, svg, h("figcaption", { class: "soft" }, `from the first kernel to the last, at most ${bytesText(most)}`, near ? `; the line is what a device has` : ""));
}

window.sbpPanels = {
  Timeline: (model, select) => {
    const all = model.data.timelines || [];
    const pick = (spans, k) => { if (spans.row && spans.row[k] !== null) select({ row: spans.row[k] }); };
    return all.length ? h("div", {}, all.map(t => new TimelineView(t, pick).element)) : null;
  },
  Memory: model => {
    const m = model.data.memory, f = model.data.figures;
    if (!m) return null;
    const capacity = f.capacity_bytes || f.memory_bytes, live = m.live, shown = Math.min(live.name.length, 40);
    const rest = live.bytes.slice(shown).reduce((a, b) => a + b, 0);
    const row = (name, type, sbp, bytes) => h("tr", {}, h("td", {}, name), h("td", { class: "mono soft" }, type), h("td", { class: "mono" }, sbp),
      h("td", { class: "n" }, bytesText(bytes)), h("td", { class: "n" }, percentText(bytes / (f.memory_bytes || 1))));
    return h("div", {}, h("p", {}, `${bytesText(f.memory_bytes)} at the peak`, f.capacity_bytes ? `, ${percentText(f.memory_bytes / capacity)} of the ${bytesText(capacity)} of a device` : "", "."),
      memoryCurve(m.course, f), h("h3", {}, "Alive at the peak"),
      h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ["tensor", "type", "lies", "bytes", "share"].map((t, k) => h("th", { class: k > 2 ? "n" : "" }, t)))),
        h("tbody", {}, Array.from({ length: shown }, (_, k) => row(live.name[k], live.type[k], live.sbp[k], live.bytes[k])),
          rest > 0 ? row(`and ${live.name.length - shown} smaller`, "", "", rest) : null, m.between_bytes > 0 ? row("between them, unused", "", "", m.between_bytes) : null))));
  },
  Stages: model => {
    const s = model.data.stages;
    if (!s || !s.stage.length) return null;
    const heads = ["stage", "placement", "forward", "backward", "kept of a micro-batch", "weights"];
    return h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, heads.map(t => h("th", {}, t)))), h("tbody", {}, s.stage.map((k, i) =>
      h("tr", {}, h("td", {}, String(k)), h("td", {}, s.place[i]), h("td", { class: "n" }, secondsText(s.forward[i])), h("td", { class: "n" }, secondsText(s.inputs[i] + s.weights[i])),
        h("td", { class: "n" }, bytesText(s.kept_bytes[i])), h("td", { class: "n" }, bytesText(s.weight_bytes[i])))))));
  },
};
