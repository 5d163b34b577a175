// The plan as the page knows it: groups within groups, and what of them is to be seen.
"use strict";

class PlanModel {
  constructor(data) {
    this.data = data;
    this.groups = data.groups || { kind: [], title: [], where: [], parent: [], times: [], ops: [], seconds: [] };
    this.sent = data.sent || { kind: [], parent: [], rows: [], count: [], bytes: [], seconds: [], exposed: [] };
    this.edges = data.edges || { from: [], to: [], bytes: [], next: [], count: [], tensors: [] };
    this.nGroups = this.groups.kind.length;
    this.n = this.nGroups + this.sent.kind.length;
    this.inside = Array.from({ length: this.n }, () => []);
    for (let v = 1; v < this.n; v++) this.inside[this.parent(v)].push(v);
    this.step = data.figures.step_seconds;
    // What a group sends is what stands in it and in the groups inside it; those come later.
    this.sentSeconds = new Float64Array(this.n);
    this.exposed = new Float64Array(this.n);
    for (let v = this.n - 1; v > 0; v--) {
      if (this.isSent(v)) {
        this.sentSeconds[v] = this.sent.seconds[v - this.nGroups];
        this.exposed[v] = this.sent.exposed[v - this.nGroups];
      }
      this.sentSeconds[this.parent(v)] += this.sentSeconds[v];
      this.exposed[this.parent(v)] += this.exposed[v];
    }
    this.tensorsOf = new Map();
    const made = data.made || { group: [], tensor: [] };
    made.group.forEach((g, k) => {
      if (!this.tensorsOf.has(g)) this.tensorsOf.set(g, []);
      this.tensorsOf.get(g).push(made.tensor[k]);
    });
    this.placesOf = new Map();
    this.sent.rows.forEach((rows, k) => rows.forEach(r => {
      if (!this.placesOf.has(r)) this.placesOf.set(r, []);
      this.placesOf.get(r).push(this.nGroups + k);
    }));
  }

  /** The rows, those that are sent as one together, led by the costliest: the time that kernels wait, then the time that they take. */
  get costliest() {
    const { exposed, seconds, times, bytes, message, place } = this.data.rows, sent = new Map();
    const byCost = (a, b) => b.exposed - a.exposed || b.seconds - a.seconds;
    seconds.forEach((_, k) => {
      const key = message[k] ? `${place[k]} ${message[k]}` : k;
      if (!sent.has(key)) sent.set(key, []);
      sent.get(key).push({ row: k, exposed: exposed[k], seconds: seconds[k], times: times[k], bytes: bytes[k] });
    });
    return [...sent.values()].map(same => {
      const [first] = same.sort(byCost), sum = what => same.reduce((s, r) => s + r[what], 0);
      return { row: first.row, more: same.length - 1, exposed: sum("exposed"), seconds: sum("seconds"), times: sum("times"), bytes: sum("bytes") };
    }).sort(byCost);
  }
  isSent(v) { return v >= this.nGroups; }
  parent(v) { return this.isSent(v) ? this.sent.parent[v - this.nGroups] : this.groups.parent[v]; }
  kind(v) { return this.isSent(v) ? this.sent.kind[v - this.nGroups] : this.groups.kind[v]; }
  opens(v) { return !this.isSent(v) && this.inside[v].length > 0; }
  /** What a node takes of the step: its kernels, and what these wait for collectives. */
  seconds(v) { return this.isSent(v) ? this.sentSeconds[v] : this.groups.seconds[v] + this.exposed[v]; }

  title(v) {
    if (!this.isSent(v)) return this.groups.title[v];
    const k = v - this.nGroups, n = this.sent.count[k];
    return (KIND_WORDS[this.sent.kind[k]] || this.sent.kind[k]) + (n > 1 ? ` ×${n}` : "");
  }

  /** The groups around a node, the outermost first. */
  around(v) {
    const found = [];
    for (let at = this.parent(v); at > 0; at = this.parent(at)) found.unshift(at);
    return found;
  }

  /** The phase that a node belongs to; -1 outside all. */
  phase(v) {
    return [...this.around(v), v].find(g => !this.isSent(g) && this.groups.kind[g] === "phase") ?? -1;
  }

  /** What is seen with some groups open and some phases hidden: for every node what stands for it, 0 for nothing. */
  visible(open, hidden) {
    const shown = new Int32Array(this.n), nodes = [];
    const walk = (v, stands) => {
      for (const child of this.inside[v]) {
        if (hidden.has(child)) continue;
        const own = stands || child;
        shown[child] = own;
        if (own === child) nodes.push(child);
        walk(child, own === child && open.has(child) ? 0 : own);
      }
    };
    walk(0, 0);
    return { shown, nodes };
  }

  /** The edges between what is seen, those between the same two as one. */
  visibleEdges(shown) {
    const found = new Map(), e = this.edges;
    for (let k = 0; k < e.from.length; k++) {
      const a = shown[e.from[k]], b = shown[e.to[k]];
      if (!a || !b || a === b || this.around(b).includes(a) || this.around(a).includes(b)) continue;
      const key = `${a}>${b}`, one = found.get(key) || { key, from: a, to: b, bytes: 0, next: true, parts: [] };
      one.bytes += e.bytes[k];
      one.next = one.next && e.next[k] === 1;
      one.parts.push(k);
      found.set(key, one);
    }
    return [...found.values()];
  }

  /** In a page of two plans: how much in every group is added, removed and changed, in words; undefined in others. */
  get changes() {
    if (!this.data.rows.change) return undefined;
    if (this.counted) return this.counted;
    const count = Array.from({ length: this.n }, () => ({ added: 0, removed: 0, changed: 0, same: 0 }));
    for (let v = this.nGroups; v < this.n; v++) for (const g of [...this.around(v), v]) count[g][this.change(v)] += 1;
    this.counted = count.map(c => ["added", "removed", "changed"].filter(k => c[k]).map(k => `${CHANGE_SIGNS[k]}${c[k]}`).join(" "));
    return this.counted;
  }

  /** In a page of two plans: what became of a collective. */
  change(v) { const c = this.data.rows.change; return c ? c[this.sent.rows[v - this.nGroups][0]] : "same"; }

  /** Whether a row is to be seen in a timeline. */
  hasTime(row) {
    this.times ??= new Set((this.data.timelines || []).flatMap(t => (t.spans.rows || []).flat()));
    return this.times.has(row);
  }

  lineText(where) { return this.data.lines ? this.data.lines[where] : undefined; }
}
