// Servers and the paths between them.

import { Keyed, byId, count, h, say, style } from "./dom.js";

const ORDER = { prefill: 0, decode: 1, plain: 2 };
const GLYPHS = { "in use": "●", draining: "◐", leaving: "◐", lost: "✕", connecting: "○", stalled: "▲", silent: "▲", avoided: "▲" };
const PARTS = [
  ["used", "in use"],
  ["reserved", "reserved"],
  ["published", "published"],
  ["quarantined", "quarantined"],
];

export class FleetView {
  /** askDrain(row): somebody pressed a server's button. */
  constructor(askDrain) {
    this.askDrain = askDrain;
    this.servers = new Keyed(byId("servers"), (key, row) => this.server(row));
    this.pairs = new Keyed(byId("pairs"), () => pair());
    this.fastest = 0;
  }

  show(store) {
    const rank = (row) => `${ORDER[row.role]}${row.instance}${row.address ?? ""}`;
    const sorted = [...store.servers].sort(([, a], [, b]) => (rank(a) < rank(b) ? -1 : 1));
    this.servers.show(new Map(sorted));
    const usable = sorted.filter(([, row]) => row.state === "in use").length;
    say(byId("fleet-note"), `${usable} of ${sorted.length} in use`);
  }

  showPairs(store) {
    const fastest = Math.max(0, ...[...store.pairs.values()].map((row) => row.gb_per_s));
    const rows = new Map([...store.pairs].map(([key, row]) => [key, { ...row, share: fastest ? row.gb_per_s / fastest : 0 }]));
    this.pairs.show(rows);
    byId("no-pairs").hidden = rows.size > 0;
    const many = store.about.num_pairs > 1024;
    say(byId("no-pairs"), many ? `${count(store.about.num_pairs)} pairs: too many to list.` : "No pair is connected.");
  }

  server(first) {
    const name = h("span", { class: "name" });
    const where = h("small");
    const state = h("span", { class: "state" }, h("span", { class: "glyph", "aria-hidden": "true" }), h("span"));
    const why = h("small");
    const [rooms, load] = [h("td", { class: "num", "data-label": "rooms" }), h("td", { class: "num", "data-label": "waiting · running" })];
    const bar = h("span", { class: "pages", "aria-hidden": "true" }, ...PARTS.map(([part]) => h("span", { class: part })));
    const pages = h("small");
    const button = h("button", { type: "button", class: "quiet", onclick: () => this.askDrain(element.row) }, "Drain");
    const element = h(
      "tr",
      { class: `role-${first.role}` },
      h("th", { scope: "row" }, h("span", { class: "role" }), name, where),
      h("td", { "data-label": "state" }, state, why),
      rooms,
      load,
      h("td", { class: "full", "data-label": "KV pages" }, bar, pages),
      h("td", { class: "act" }, button),
    );
    const update = (row) => {
      element.row = row;
      say(element.querySelector(".role"), row.role);
      say(name, row.instance || "not met yet");
      say(where, row.address ?? "");
      state.dataset.state = row.state;
      say(state.firstChild, GLYPHS[row.state] ?? "○");
      say(state.lastChild, row.state);
      say(why, row.why === row.state ? "" : row.why);
      say(rooms, count(row.rooms));
      say(load, `${count(row.waiting)} · ${count(row.running)}`);
      showPages(bar, pages, row.pages);
      button.hidden = row.state === "draining" || !["in use", "stalled", "silent", "avoided"].includes(row.state);
      button.setAttribute("aria-label", `Drain ${row.role} server ${row.instance}`);
    };
    return { element, update };
  }
}

function showPages(bar, text, pages) {
  if (!pages.total) return say(text, "–");
  const held = pages.total - pages.free;
  const sizes = { ...pages, used: Math.max(0, held - pages.reserved - pages.published - pages.quarantined) };
  PARTS.forEach(([part], index) => style(bar.children[index], "width", `${(100 * sizes[part]) / pages.total}%`));
  const others = PARTS.slice(1).filter(([part]) => pages[part]).map(([part, word]) => `${count(pages[part])} ${word}`);
  const cached = pages.cached ? ` (${count(pages.cached)} cached)` : "";
  return say(text, [`${count(pages.free)} of ${count(pages.total)} free${cached}`, ...others].join(", "));
}

function pair() {
  const [from, to] = [h("span", { class: "name role-prefill" }), h("span", { class: "name role-decode" })];
  const [over, speed] = [h("td"), h("span")];
  const bar = h("span", { class: "share", "aria-hidden": "true" });
  const element = h(
    "tr",
    {},
    h("th", { scope: "row" }, from, h("span", { class: "arrow", "aria-label": "to" }, " → "), to),
    over,
    h("td", { class: "num" }, speed, bar),
  );
  const update = (row) => {
    say(from, row.prefill);
    say(to, row.decode);
    say(over, row.transport || "unknown");
    say(speed, row.gb_per_s ? row.gb_per_s.toFixed(row.gb_per_s < 10 ? 2 : 1) : "not measured");
    style(bar, "width", `${100 * row.share}%`);
  };
  return { element, update };
}
