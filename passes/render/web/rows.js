// The table of collectives: sortable, with a filter; the costliest first.
"use strict";

const ROW_HEADS = [
  ["share", "waits", r => r.exposed, true], ["kind", "collective", r => r.kind, false], ["times", "×", r => r.times, true],
  ["tensor", "tensor", r => r.tensor, false], ["before", "before → after", r => r.before, false], ["over", "over", r => r.over, false],
  ["bytes", "sent", r => r.bytes, true], ["seconds", "time", r => r.seconds, true], ["exposed", "exposed", r => r.exposed, true],
  ["line", "line", r => r.line, false], ["reason", "why", r => r.reason, false],
];

class RowTable {
  constructor(model, select) {
    this.model = model;
    this.select = select;
    const c = model.data.rows;
    this.rows = c.kind.map((_, k) => Object.fromEntries([["k", k], ...Object.keys(c).map(name => [name, c[name][k]])]));
    this.order = ["exposed", -1];
    this.marked = [];
    this.filter = "";
    this.body = h("tbody");
    this.heads = ROW_HEADS.map(([name, title, , isNumber]) =>
      h("th", { scope: "col", class: `${isNumber ? "n " : ""}c-${name}`, "aria-sort": "none" },
        h("button", { type: "button", onclick: () => this.sortBy(name, isNumber) }, title)));
    this.said = h("p", { class: "soft", "aria-live": "polite" });
    this.element = h("div", { class: "table" },
      h("label", { class: "filter" }, "filter ", h("input", {
        type: "search", placeholder: "all-gather, gpt.py:41, params…", oninput: e => { this.filter = e.target.value.toLowerCase(); this.fill(); } })),
      h("div", { class: "scroll", tabindex: 0 }, h("table", { class: "rows" }, h("thead", {}, h("tr", {}, this.heads)), this.body)), this.said);
    this.fill();
  }

  sortBy(name, isNumber) {
    const key = name === "share" ? "exposed" : name;
    this.order = [key, this.order[0] === key ? -this.order[1] : isNumber ? -1 : 1];
    this.fill();
  }

  fill() {
    const [key, sign] = this.order, head = ROW_HEADS.find(r => r[0] === key);
    const text = r => `${KIND_WORDS[r.kind]} ${r.kind} ${r.tensor} ${r.type} ${r.before} ${r.after} ${r.over} ${r.line} ${r.reason}`.toLowerCase();
    const shown = this.rows.filter(r => this.filter.split(/\s+/).every(w => text(r).includes(w)));
    shown.sort((a, b) => { const x = head[2](a), y = head[2](b); return sign * (x < y ? -1 : x > y ? 1 : a.seconds - b.seconds || a.k - b.k); });
    ROW_HEADS.forEach(([name], i) => {
      const isKey = name === key || (name === "share" && key === "exposed");
      this.heads[i].setAttribute("aria-sort", isKey ? (sign < 0 ? "descending" : "ascending") : "none");
    });
    this.body.replaceChildren(...shown.map(r => this.line(r)));
    const total = shown.reduce((s, r) => s + r.seconds, 0), sent = shown.reduce((s, r) => s + r.bytes, 0);
    this.said.textContent = `${shown.length} of ${this.rows.length} rows, ${shown.reduce((s, r) => s + r.times, 0)} collectives: `
      + `${bytesText(sent)}, ${secondsText(total)}`;
  }

  line(r) {
    const cell = (name, ...content) => h("td", { class: `c-${name}${ROW_HEADS.find(x => x[0] === name)[3] ? " n" : ""}` }, ...content);
    const line = h("tr", { "data-row": r.k, onclick: () => this.select({ row: r.k }) },
      cell("share", h("button", { type: "button", "aria-label": `show ${KIND_WORDS[r.kind]} of ${r.tensor}` }, percentText(r.exposed / this.model.step))),
      cell("kind", pill(r.kind)), cell("times", String(r.times)),
      cell("tensor", r.tensor, h("br"), h("span", { class: "mono soft" }, r.type)),
      cell("before", h("span", { class: "mono" }, `${r.before} →`, h("br"), r.after)),
      cell("over", r.over), cell("bytes", bytesText(r.bytes)),
      cell("seconds", this.model.hasTime(r.k) ? h("button", { type: "button", class: "link", title: "show in the timeline", onclick: e => { e.stopPropagation(); this.select({ row: r.k, in: "Timeline" }); } }, secondsText(r.seconds)) : secondsText(r.seconds)), ...besideCells(r, cell),
      cell("exposed", secondsText(r.exposed)), cell("line", h("span", { class: "mono" }, r.line)), cell("reason", r.reason));
    if (this.marked.includes(r.k)) line.classList.add("marked");
    return line;
  }

  /** Lights some rows. */
  mark(rows) {
    this.marked = rows;
    for (const line of this.body.rows) line.classList.toggle("marked", rows.includes(Number(line.dataset.row)));
    const line = this.body.querySelector(".marked"), scroll = this.element.querySelector(".scroll");
    if (line) scroll.scrollTop = line.offsetTop - scroll.clientHeight / 2;
  }

  /** Goes to the first row that is lit. */
  reveal() {
    const line = this.body.querySelector(".marked");
    if (line) { line.scrollIntoView({ block: "center" }); line.querySelector("button").focus({ preventScroll: true }); }
  }
}
