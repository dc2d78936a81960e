// Rooms that are open now.

import { Keyed, byId, count, h, say, time } from "./dom.js";

const STEPS = ["BOOTSTRAPPING", "WAITING", "TRANSFERRING", "SUCCESS"];
const WORDS = { BOOTSTRAPPING: "bootstrapping", WAITING: "waiting", TRANSFERRING: "transferring", SUCCESS: "streaming", FAILED: "failed" };

export class RoomsView {
  constructor() {
    this.rows = new Keyed(byId("live"), (name) => room(name));
  }

  show(store) {
    const rows = new Map([...store.live].sort(([, a], [, b]) => a.accepted - b.accepted));
    this.rows.show(rows);
    byId("no-live").hidden = rows.size > 0;
    const open = store.counts.open;
    const parts = STEPS.filter((step) => store.counts.states[step]).map((step) => `${count(store.counts.states[step])} ${WORDS[step]}`);
    if (open > rows.size && rows.size) parts.push(`the oldest ${rows.size} are listed`);
    say(byId("live-note"), parts.join(" · "));
    this.age(store);
  }

  /** Ages grow without news. */
  age(store) {
    const now = store.now();
    for (const { row, inState, age } of this.rows.parts.values()) {
      say(inState, time(Math.max(0, now - row.entered)));
      say(age, time(Math.max(0, now - row.accepted)));
    }
  }
}

function room(name) {
  const [prompt, servers] = [h("span"), h("span", { class: "wide" })];
  const about = h("small", {}, prompt, servers);
  const track = h("span", { class: "track", "aria-hidden": "true" }, ...STEPS.map(() => h("i")));
  const word = h("span");
  const [inState, age, tokens] = [h("td", { class: "num wide" }), h("td", { class: "num" }), h("td", { class: "num" })];
  const element = h(
    "tr",
    {},
    h("th", { scope: "row" }, h("span", { class: "name mono" }, name), about),
    h("td", {}, h("span", { class: "step" }, track, word)),
    inState,
    age,
    tokens,
  );
  const part = { element, inState, age };
  part.update = (row) => {
    element.dataset.state = row.state;
    say(prompt, `${count(row.prompt)}-token prompt`);
    say(servers, ` · ${row.servers.join(" → ")}`);
    const reached = STEPS.indexOf(row.state);
    STEPS.forEach((step, index) => track.children[index].classList.toggle("on", index <= reached));
    say(word, WORDS[row.state] ?? row.state);
    say(tokens, count(row.tokens));
  };
  return part;
}
