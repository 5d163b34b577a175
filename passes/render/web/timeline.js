// Timelines: lanes with what ran when, and what was held. Drawn on a canvas; wheel and buttons zoom, dragging moves.
"use strict";

const LABELS = 84, HELD = 44;

class TimelineView {
  /** onPick: is told of a span that was clicked, `{ rows, node, opens }`. */
  constructor(data, onPick) {
    Object.assign(this, { data, onPick, from: 0, to: data.seconds, cursor: -1, lit: new Set() });
    this.canvas = h("canvas", { class: "timeline", role: "img", tabindex: 0, "aria-label":
      `${data.name}: ${data.lanes.join(", ")}. Arrows go from box to box, Enter shows one in the graph and the table, + and - zoom.` });
    this.said = h("p", { class: "soft mono", "aria-live": "polite" }, "point at a box or use the arrow keys; a click or Enter shows it in the graph and the table");
    const act = (name, label, what) => h("button", { type: "button", "aria-label": label, onclick: what }, name);
    const bubble = data.bubble === undefined ? "" : `, bubble ${percentText(data.bubble)}`;
    this.element = h("figure", {}, h("figcaption", {}, h("b", {}, data.name), ` ${secondsText(data.seconds)}${bubble} `,
      act("all", "the whole of it", () => this.show(0, data.seconds)), act("+", "zoom in", () => this.zoom(1 / 1.5)), act("−", "zoom out", () => this.zoom(1.5))), this.canvas, this.said);
    this.canvas.addEventListener("wheel", e => {
      if (!e.ctrlKey && !e.shiftKey && Math.abs(e.deltaX) < Math.abs(e.deltaY)) return;
      e.preventDefault();
      this.zoom(e.deltaY > 0 ? 1.2 : 1 / 1.2, this.at(e));
    }, { passive: false });
    this.canvas.addEventListener("pointerdown", () => { this.moved = 0; });
    this.canvas.addEventListener("pointermove", e => (e.buttons & 1 ? this.drag(e) : this.point(e)));
    this.canvas.addEventListener("click", e => { if (this.moved < 4) this.pick(this.hit(e)); });
    this.canvas.addEventListener("keydown", e => this.key(e));
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  key(e) {
    const act = {
      ArrowLeft: () => this.step(-1), ArrowRight: () => this.step(1), ArrowUp: () => this.change(-1), ArrowDown: () => this.change(1),
      Home: () => this.go(0), "+": () => this.zoom(1 / 1.5), "-": () => this.zoom(1.5), Enter: () => this.pick(this.cursor), " ": () => this.pick(this.cursor),
    }[e.key];
    if (act) { e.preventDefault(); act(); }
  }

  /** The spans of a lane in the order of time. */
  lane(k) {
    const s = this.data.spans;
    return s.lane.map((_, i) => i).filter(i => s.lane[i] === k).sort((a, b) => s.from[a] - s.from[b]);
  }

  /** To the span before or behind in the same lane. */
  step(by) {
    if (this.cursor < 0) { this.go(this.lane(this.data.spans.lane[0])[0]); return; }
    const lane = this.lane(this.data.spans.lane[this.cursor]), at = lane.indexOf(this.cursor) + by;
    if (lane[at] !== undefined) this.go(lane[at]);
  }

  /** To the span in the next lane that begins nearest. */
  change(by) {
    const s = this.data.spans;
    if (this.cursor < 0) { this.step(1); return; }
    for (let k = s.lane[this.cursor] + by; k >= 0 && k < this.data.lanes.length; k += by) {
      const near = this.lane(k).sort((a, b) => Math.abs(s.from[a] - s.from[this.cursor]) - Math.abs(s.from[b] - s.from[this.cursor]));
      if (near.length) { this.go(near[0]); return; }
    }
  }

  go(k) {
    if (k === undefined || !this.data.spans.lane.length) return;
    const s = this.data.spans, width = this.to - this.from;
    this.cursor = k;
    if (s.from[k] < this.from || s.to[k] > this.to) this.show((s.from[k] + s.to[k] - width) / 2, (s.from[k] + s.to[k] + width) / 2);
    this.say(k);
    this.draw();
  }

  pick(k) {
    if (k < 0) return;
    const s = this.data.spans, of = name => (s[name] ? s[name][k] : null);
    this.cursor = k;
    this.say(k);
    if (this.onPick) this.onPick({ rows: of("rows") || [], node: of("node"), opens: of("opens") });
  }

  /** Lights the spans of some rows of the table, or of a part of the graph; how many there are. */
  mark(rows, isPart) {
    const s = this.data.spans, has = k => s.rows && (s.rows[k] || []).some(r => rows.includes(r));
    this.lit = new Set(s.lane.map((_, k) => k).filter(k => has(k) || (s.node && s.node[k] !== null && isPart(s.node[k]))));
    this.draw();
    return this.lit.size;
  }

  /** Goes to the first span that is lit. */
  reveal() {
    const s = this.data.spans, [first] = [...this.lit].sort((a, b) => s.from[a] - s.from[b]);
    if (first === undefined) return;
    const width = Math.min(this.data.seconds, Math.max(12 * (s.to[first] - s.from[first]), this.data.seconds / 40)), middle = (s.from[first] + s.to[first]) / 2;
    this.show(middle - width / 2, middle + width / 2);
    this.go(first);
    this.element.scrollIntoView({ block: "center" });
    this.canvas.focus({ preventScroll: true });
  }

  at(e) { const r = this.canvas.getBoundingClientRect(); return this.from + (this.to - this.from) * Math.max(0, e.clientX - r.left - LABELS) / (r.width - LABELS); }
  show(from, to) {
    const width = Math.min(to - from, this.data.seconds);
    this.from = Math.max(0, Math.min(from, this.data.seconds - width));
    this.to = this.from + width;
    this.draw();
  }
  zoom(by, around = (this.from + this.to) / 2) { this.show(around - (around - this.from) * by, around + (this.to - around) * by); }
  drag(e) {
    this.moved += Math.abs(e.movementX);
    const w = (this.to - this.from) * e.movementX / (this.canvas.clientWidth - LABELS);
    this.show(this.from - w, this.to - w);
  }

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

  point(e) { this.say(this.hit(e)); }

  say(k) {
    const s = this.data.spans, opens = k >= 0 && s.opens && s.opens[k] !== null && s.opens[k] !== undefined;
    this.said.textContent = k < 0 ? "" : `${s.title[k]}: ${secondsText(s.from[k])} to ${secondsText(s.to[k])}, ${secondsText(s.to[k] - s.from[k])}${opens ? "; a click leads to one trip of it" : ""}`;
  }

  draw() {
    const { canvas, data } = this, lanes = this.lanes(), width = canvas.clientWidth, dpr = window.devicePixelRatio || 1;
    if (!width) return;
    const held = (data.held || []).filter(c => c.length), bottom = lanes.length ? lanes[lanes.length - 1].y + lanes[lanes.length - 1].height : 0;
    const total = bottom + held.length * HELD + 24;
    canvas.style.height = `${total}px`;
    canvas.width = width * dpr;
    canvas.height = total * dpr;
    const g = canvas.getContext("2d"), scale = (width - LABELS) / (this.to - this.from || 1), place = t => LABELS + (t - this.from) * scale;
    g.scale(dpr, dpr);
    g.font = `11px ${cssColour("--font")}`;
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
    this.heldCurves(g, held, bottom, place);
    this.axis(g, place, bottom + held.length * HELD, width);
    g.restore();
  }

  spans(g, lanes, place) {
    const s = this.data.spans, deepest = Math.max(...s.stage, 1), lit = [], wide = t => g.measureText(t).width + 6;
    for (let k = 0; k < s.lane.length; k++) {
      if (s.to[k] < this.from || s.from[k] > this.to) continue;
      const lane = lanes[s.lane[k]], x = place(s.from[k]), w = Math.max(0.6, place(s.to[k]) - x), mark = MARKS[s.kind[k]] || MARKS.kernel;
      g.globalAlpha = 1 - 0.35 * (s.stage[k] > 0 && lane.height > 10 ? s.stage[k] / deepest : 0);
      g.fillStyle = mark.fill;
      g.fillRect(x, lane.y, w, lane.height);
      g.globalAlpha = 1;
      if (w > 3) { g.strokeStyle = mark.border; g.lineWidth = 0.8; g.strokeRect(x, lane.y, w, lane.height); }
      // The whole label where there is room for it, else the code.
      const from = Math.max(x, LABELS), seen = Math.min(x + w, this.canvas.clientWidth) - from, short = s.rows && s.rows[k].length ? mark.code : "";
      const label = seen > 14 && wide(s.label[k]) <= seen ? s.label[k] : seen > 14 && short && wide(short) <= seen ? short : "";
      if (lane.height > 10 && label) { g.fillStyle = INK; g.textAlign = "center"; g.fillText(label, from + seen / 2, lane.y + lane.height / 2); g.textAlign = "left"; }
      if (this.lit.has(k) || k === this.cursor) lit.push([x, lane.y, w, lane.height, k === this.cursor]);
    }
    for (const [x, y, w, height, isCursor] of lit) {
      g.strokeStyle = cssColour("--mark");
      g.lineWidth = 3;
      g.setLineDash(isCursor ? [4, 2] : []);
      g.strokeRect(x - 0.5, y - 0.5, w + 1, height + 1);
    }
    g.setLineDash([]);
  }

  heldCurves(g, held, bottom, place) {
    const most = Math.max(...held.flat().map(p => p[1]), 1);
    held.forEach((points, k) => {
      const top = bottom + 8 + k * HELD, base = top + 34;
      g.beginPath();
      g.moveTo(place(0), base);
      let last = 0;
      for (const [t, bytes] of points) { g.lineTo(place(t), base - 20 * last / most); g.lineTo(place(t), base - 20 * bytes / most); last = bytes; }
      g.lineTo(place(this.data.seconds), base - 20 * last / most);
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
      // What has no room at the right edge is left out.
      if (place(t) + 3 + g.measureText(secondsText(t)).width <= width) g.fillText(secondsText(t), place(t) + 3, y + 12);
    }
  }
}

/** All timelines of a page: lit together, and one leads to another. */
class Timelines {
  constructor(all, select) {
    this.views = all.map(t => new TimelineView(t, span => {
      if (span.opens !== null && span.opens !== undefined) this.views[span.opens].element.scrollIntoView({ block: "center" });
      if (span.rows.length) select({ row: span.rows[0], rows: span.rows }); else if (span.node) select({ node: span.node });
    }));
    const steps = this.views.filter(v => !v.data.trip), trips = this.views.filter(v => v.data.trip);
    this.element = h("div", {}, steps.map(v => v.element), trips.length ? h("h3", {}, "One trip of each loop") : null, trips.map(v => v.element));
  }

  /** Lights what belongs to some rows or to a part; whether anything does. */
  mark(rows, isPart) { return this.views.map(v => v.mark(rows, isPart)).some(n => n > 0); }
  reveal() { const view = this.views.find(v => v.lit.size); if (view) view.reveal(); }
}
