// Requests that have ended, the newest first.

import { Keyed, byId, count, h, say, style, time } from "./dom.js";
import { phases } from "./waterfall.js";

const SHOWN = 300;

export class EndedView {
  /** open(request): somebody wants its waterfall. */
  constructor(open, changed) {
    this.open = open;
    this.rows = new Keyed(byId("finished"), (key, row) => this.row(row));
    this.onlyFailed = byId("only-failed");
    this.hold = byId("hold");
    this.onlyFailed.addEventListener("change", changed);
    this.hold.addEventListener("change", changed);
  }

  show(store) {
    if (this.hold.checked && this.shown === this.onlyFailed.checked) return;
    this.shown = this.onlyFailed.checked;
    const wanted = [...store.ended.values()].reverse().filter((one) => !this.shown || one.failure);
    this.rows.show(new Map(wanted.slice(0, SHOWN).map((one) => [one.n, one])));
    for (const part of this.rows.parts.values()) part.date(store);
    byId("no-ended").hidden = wanted.length > 0;
    say(byId("no-ended"), this.shown ? "None of those that are kept failed." : "No request has ended yet.");
  }

  row(one) {
    const at = h("time");
    const outcome = one.failure
      ? h("span", { class: "outcome failed" }, h("span", { "aria-hidden": "true" }, "✕ "), one.failure.cause)
      : h("span", { class: "outcome" }, one.finish || "ended");
    if (one.attempts) outcome.append(h("small", {}, ` after ${one.attempts.length} retried`));
    const element = h(
      "tr",
      { class: one.failure ? "failed" : undefined },
      h("th", { scope: "row" }, h("button", { type: "button", class: "link mono", onclick: () => this.open(one) }, one.name)),
      h("td", { class: "wide" }, at),
      h("td", {}, outcome),
      h("td", { class: "num wide" }, count(one.prompt)),
      h("td", { class: "num wide" }, count(one.tokens)),
      h("td", { class: "num" }, one.ttft ? time(one.ttft) : "–"),
      h("td", { class: "num wide" }, one.itl ? time(one.itl) : "–"),
      h("td", { class: "num" }, time(one.total)),
      h("td", { class: "wide" }, small(one)),
    );
    const part = { element, update: () => {} };
    part.date = (store) => {
      if (at.textContent) return;
      const date = store.date(one.at);
      at.dateTime = date.toISOString();
      say(at, date.toLocaleTimeString([], { hour12: false }));
    };
    return part;
  }
}

/** The waterfall in one line. */
function small(one) {
  const bar = h("span", { class: "small", "aria-hidden": "true" });
  for (const phase of phases(one)) {
    const part = h("i", { class: `phase ${phase.kind}` });
    style(part, "width", `${(100 * phase.ms) / Math.max(one.total, 0.001)}%`);
    bar.append(part);
  }
  return bar;
}
