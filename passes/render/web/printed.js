// What is printed: the graph as it is open, as a drawing with texts, in light colours; all panels.
"use strict";

/** The graph as SVG. */
function graphDrawing(view) {
  const NS = "http://www.w3.org/2000/svg", cy = view.cy, m = view.model, box = cy.nodes().boundingBox({ includeLabels: false });
  const make = (name, attributes, ...children) => {
    const e = document.createElementNS(NS, name);
    for (const [k, v] of Object.entries(attributes)) e.setAttribute(k, v);
    e.append(...children);
    return e;
  };
  const svg = make("svg", { class: "print-graph", role: "img", viewBox: `${box.x1 - 8} ${box.y1 - 8} ${box.w + 16} ${box.h + 16}`, "aria-label": "the program as a graph" });
  const at = v => { const n = cy.$id(String(v)); return { x: n.position("x"), y: n.position("y"), w: n.data("w"), h: n.data("h") }; };
  // Where a line from the middle of a box leaves it.
  const border = (a, b) => {
    const dx = b.x - a.x, dy = b.y - a.y, part = Math.min(Math.abs(a.w / 2 / (dx || 1e-9)), Math.abs(a.h / 2 / (dy || 1e-9)), 1);
    return [a.x + dx * part, a.y + dy * part];
  };
  const isOpen = v => view.open.has(v);
  const box_of = v => {
    const { x, y, w, h: height } = at(v), mark = MARKS[m.kind(v)], sent = m.isSent(v), g = make("g", {});
    if (sent) {
      const cut = Math.min(w / 5, height / 2), left = x - w / 2, right = x + w / 2, points = [[left, y], [left + cut, y - height / 2], [right - cut, y - height / 2], [right, y], [right - cut, y + height / 2], [left + cut, y + height / 2]];
      g.append(make("polygon", { points: points.map(p => p.join(",")).join(" "), fill: mark.fill, stroke: mark.border, "stroke-width": 2, "fill-opacity": m.change(v) === "removed" ? 0.3 : 1, "stroke-dasharray": m.change(v) === "removed" ? "5 3" : "none" }));
    } else g.append(make("rect", { x: x - w / 2, y: y - height / 2, width: w, height, rx: 6, fill: isOpen(v) ? "#f3f6f9" : "#ffffff", stroke: isOpen(v) ? "#d0d7de" : "#7b8794" }));
    const { label } = view.label(v, w, height, 1), lines = label.split("\n"), top = isOpen(v) ? y - height / 2 + 20 : y - (lines.length - 1) * 7.5 + 4;
    lines.forEach((text, k) => g.append(make("text", { x, y: top + 15 * k, "text-anchor": "middle", "font-size": 12, fill: INK, "font-weight": isOpen(v) ? 700 : 400 }, text)));
    return g;
  };
  const order = [...view.seen].sort((a, b) => m.around(a).length - m.around(b).length);
  svg.append(...order.filter(isOpen).map(box_of));
  for (const e of view.seenEdges) {
    if (isOpen(e.from) || isOpen(e.to)) continue;
    const a = at(e.from), b = at(e.to), [x1, y1] = border(a, b), [x2, y2] = border(b, a);
    svg.append(make("line", { x1, y1, x2, y2, stroke: "#7b8794", "stroke-width": 1.2, "stroke-opacity": m.phase(e.from) !== m.phase(e.to) ? 0.3 : 0.8, "stroke-dasharray": e.next ? "4 3" : "none" }));
  }
  svg.append(...order.filter(v => !isOpen(v)).map(box_of));
  return svg;
}

/** Before it is printed all panels are laid out and drawn, and the graph is a drawing. */
function printing(view, timelines) {
  const root = document.documentElement;
  window.addEventListener("beforeprint", () => {
    root.classList.add("printing");
    document.querySelector(".print-graph")?.remove();
    if (view) view.element.append(graphDrawing(view));
    if (timelines) timelines.views.forEach(v => v.show(0, v.data.seconds));
  });
  window.addEventListener("afterprint", () => { root.classList.remove("printing"); document.querySelector(".print-graph")?.remove(); });
}
