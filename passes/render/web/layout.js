// Where everything goes. Runs in a worker: open groups are laid out from the inside out, each by dagre.
"use strict";

const PAD = 18, HEAD = 34, GAP = 46;

/** Places the nodes inside one group; positions are from its upper left corner. */
function layOut(members, sizes, edges, direction) {
  const g = new dagre.graphlib.Graph();
  g.setGraph({ rankdir: direction, nodesep: 22, ranksep: 30, marginx: 0, marginy: 0 });
  g.setDefaultEdgeLabel(() => ({}));
  for (const v of members) g.setNode(String(v), { width: sizes.get(v).w, height: sizes.get(v).h });
  for (const [a, b, weight] of edges) g.setEdge(String(a), String(b), { weight });
  dagre.layout(g);
  const at = new Map();
  for (const v of members) { const n = g.node(String(v)); at.set(v, { x: n.x - n.width / 2, y: n.y - n.height / 2 }); }
  return fromZero(at, sizes);
}

/** Phases side by side, in their order. */
function sideBySide(members, sizes) {
  const at = new Map();
  let x = 0;
  for (const v of members) { at.set(v, { x, y: 0 }); x += sizes.get(v).w + GAP; }
  return fromZero(at, sizes);
}

function fromZero(at, sizes) {
  let left = Infinity, top = Infinity, right = 0, bottom = 0;
  for (const p of at.values()) { left = Math.min(left, p.x); top = Math.min(top, p.y); }
  for (const [v, p] of at) {
    p.x -= left; p.y -= top;
    right = Math.max(right, p.x + sizes.get(v).w);
    bottom = Math.max(bottom, p.y + sizes.get(v).h);
  }
  return { at, w: right, h: bottom };
}

/** job: nodes [{id, parent, w, h, phase, kind}], edges [[from, to, next]]; gives [id, x, y, w, h], the middles. */
function arrange(job) {
  const nodes = new Map(job.nodes.map(n => [n.id, n])), inside = new Map(), sizes = new Map(), placed = new Map();
  for (const n of job.nodes) {
    if (!inside.has(n.parent)) inside.set(n.parent, []);
    inside.get(n.parent).push(n.id);
  }
  const chain = v => { const c = []; for (let at = v; at !== 0; at = nodes.get(at).parent) c.unshift(at); return c; };
  const byGroup = new Map();
  for (const [a, b, next] of job.edges) {
    const ca = chain(a), cb = chain(b);
    let k = 0;
    while (k < ca.length && k < cb.length && ca[k] === cb[k]) k += 1;
    if (next || k >= ca.length || k >= cb.length) continue;
    const group = k ? ca[k - 1] : 0, key = `${ca[k]}>${cb[k]}`;
    if (!byGroup.has(group)) byGroup.set(group, new Map());
    const at = byGroup.get(group), known = at.get(key);
    at.set(key, [ca[k], cb[k], (known ? known[2] : 0) + 1]);
  }
  const size = v => {
    const members = inside.get(v) || [];
    for (const child of members) size(child);
    if (!members.length && v !== 0) { sizes.set(v, { w: nodes.get(v).w, h: nodes.get(v).h }); return; }
    const kinds = members.map(m => nodes.get(m).kind);
    const phases = kinds.includes("phase") && kinds.every(k => k === "phase" || k === "loop");
    const edges = [...(byGroup.get(v) || new Map()).values()];
    const up = v !== 0 && nodes.get(v).phase === "backward";
    const found = phases ? sideBySide(members, sizes) : layOut(members, sizes, edges, up ? "BT" : "TB");
    placed.set(v, found);
    const least = v === 0 ? 0 : nodes.get(v).w;
    sizes.set(v, { w: Math.max(found.w, least) + 2 * PAD, h: found.h + PAD + HEAD });
  };
  size(0);
  const out = [];
  const put = (v, x, y) => {
    const own = sizes.get(v);
    if (v !== 0) out.push([v, x + own.w / 2, y + own.h / 2, own.w, own.h]);
    const found = placed.get(v);
    if (!found) return;
    const shift = (own.w - 2 * PAD - found.w) / 2;
    for (const [child, p] of found.at) put(child, x + PAD + shift + p.x, y + HEAD + p.y);
  };
  put(0, 0, 0);
  return out;
}

if (typeof WorkerGlobalScope !== "undefined") onmessage = e => postMessage({ id: e.data.id, places: arrange(e.data) });
