// Where the time of one finished request went. Every number is the gateway's; what it did not measure is not drawn.

import { byId, bytes, count, h, say, style, time } from "./dom.js";

const NAMES = { queue: "before its room", BOOTSTRAPPING: "bootstrapping", WAITING: "waiting", TRANSFERRING: "transferring", SUCCESS: "streaming", FAILED: "failed" };
const ABOUT = {
  queue: "checked, tokenised, queued",
  BOOTSTRAPPING: "decode reserves pages, prefill learns of them",
  WAITING: "until the first KV page is sent",
  TRANSFERRING: "layers leave as prefill computes them",
  SUCCESS: "decode has every page",
};

/** [{kind, start, ms}]: the states of its last room, after what came before it. */
export function phases(one) {
  const found = [];
  const first = one.states.length ? one.states[0][1] : 0;
  if (first > 0) found.push({ kind: "queue", start: 0, ms: first });
  for (const [state, start, ms] of one.states) found.push({ kind: state, start, ms });
  return found;
}

export class Waterfall {
  constructor() {
    this.dialog = byId("waterfall");
    this.dialog.querySelector("[data-close]").addEventListener("click", () => this.dialog.close());
    this.dialog.addEventListener("click", (event) => event.target === this.dialog && this.dialog.close());
  }

  open(one) {
    say(byId("w-title"), `Request ${one.name}`);
    byId("w-body").replaceChildren(this.outcome(one), this.lines(one), this.facts(one), ...this.attempts(one));
    this.dialog.showModal();
  }

  outcome(one) {
    if (!one.failure) return h("p", { class: "note" }, `${one.servers.join(" → ")}, ended by ${one.finish || "the gateway"}`);
    const { cause, origin, stage, text, allowed } = one.failure;
    const limit = allowed ? ` (${time(allowed)} were allowed)` : "";
    return h("p", { class: "problem" }, h("strong", {}, cause), ` — ended by ${origin} while ${NAMES[stage] ?? stage.toLowerCase()}: ${text}${limit}`);
  }

  lines(one) {
    const total = Math.max(one.total, 0.001);
    const rows = phases(one).flatMap(({ kind, start, ms }) => [
      line({ "data-state": kind }, kind, NAMES[kind] ?? kind, ABOUT[kind] ?? "", start, ms, total, one.ttft),
      ...(kind === "TRANSFERRING" ? this.layers(one, start, total) : []),
    ]);
    const marks = { prefill_started: "prefill began", transferred: "last page flushed", kv_ready: "doorbell seen" };
    const moments = Object.entries(marks).filter(([mark]) => mark in one.marks).map(([mark, text]) => [text, one.marks[mark]]);
    if (one.ttft) moments.push(["first token", one.ttft]);
    moments.sort((a, b) => a[1] - b[1]);
    return h(
      "div",
      {},
      h(
        "table",
        { class: "lines" },
        h("caption", { class: "hidden" }, "States of the room in order, with their beginning and duration"),
        h("thead", {}, h("tr", {}, ...["state", "from", "for", ""].map((text, index) =>
          h("th", { scope: "col", class: index === 1 || index === 2 ? "num" : undefined }, text || h("span", { class: "hidden" }, "drawn to scale"))))),
        h("tbody", {}, ...rows),
      ),
      h("p", { class: "note moments" }, ...moments.map(([text, ms]) => h("span", { "data-mark": text }, `${text} `, h("b", {}, time(ms))))),
    );
  }

  /** A line for each part of the transfer, from when the gateway heard that it began. */
  layers(one, start, total) {
    const parts = one.transfer?.parts ?? [];
    const began = one.marks.transfer_started ?? start;
    const queues = new Set(parts.map(([queue]) => queue)).size;
    return parts.map(([queue, first, layers, from, ms, size]) => {
      const name = layers > 1 ? `layers ${first}–${first + layers - 1}` : `layer ${first}`;
      return line({ "data-layers": `${first}-${first + layers - 1}`, class: "part" }, "TRANSFERRING", queues > 1 ? `${name}, queue ${queue}` : name, bytes(size), began + from, ms, total, one.ttft);
    });
  }

  facts(one) {
    const rows = [
      ["prompt", `${count(one.prompt)} tokens`],
      ["answer", `${count(one.tokens)} tokens`],
      ["TTFT", one.ttft ? time(one.ttft) : "no token came"],
      ["mean ITL", one.itl ? time(one.itl) : "–"],
      ["total", time(one.total)],
    ];
    const moved = one.transfer;
    if (moved) {
      const rate = moved.busy > 0 ? `, ${(moved.bytes / moved.busy / 1e6).toFixed(2)} GB/s` : "";
      rows.push(
        ["KV moved", `${bytes(moved.bytes)} in ${count(moved.puts)} puts over ${moved.transport}`],
        ["writing", moved.busy > 0 ? `${time(moved.busy)}${rate}` : "not measured"],
        ["first put to flush", `${time(moved.duration)}, prefill runs meanwhile`],
        ["after the last layer", time(moved.exposed)],
        ["digest", moved.digest ? "equal on both sides" : "not checked"],
        ...(moved.parts?.length ? [] : [["by layer", "not known"]]),
      );
    } else rows.push(["KV moved", one.local ? "none: decode computed the prompt" : "none"]);
    if (one.recomputed) rows.push(["recomputed", `${count(one.recomputed)} tokens`]);
    if (one.room) rows.push(["room", one.room], ["request id", one.id]);
    return h("dl", { class: "facts" }, ...rows.map(([name, value]) => h("div", { "data-fact": name }, h("dt", {}, name), h("dd", {}, value))));
  }

  attempts(one) {
    return (one.attempts ?? []).map(({ servers, tokens, failure }) =>
      h("p", { class: "note" }, `Before: ${failure.cause} by ${failure.origin} in ${failure.stage.toLowerCase()} on ${servers.join(" and ")}, after ${count(tokens)} tokens.`),
    );
  }
}

/** about: attributes of the row, beside its times. */
function line(about, kind, name, small, start, ms, total, ttft) {
  const bar = h("i", { class: `phase ${kind}` });
  style(bar, "left", `${(100 * start) / total}%`);
  style(bar, "width", `${(100 * ms) / total}%`);
  const drawn = h("span", { class: "drawn" }, bar);
  if (ttft) {
    const mark = h("i", { class: "first-token", title: `first token, ${time(ttft)}` });
    style(mark, "left", `${(100 * ttft) / total}%`);
    drawn.append(mark);
  }
  return h(
    "tr",
    { ...about, "data-start": start, "data-ms": ms },
    h("th", { scope: "row" }, h("i", { class: `swatch phase ${kind}`, "aria-hidden": "true" }), name, h("small", {}, small)),
    h("td", { class: "num" }, time(start)),
    h("td", { class: "num" }, time(ms)),
    h("td", { class: "bar", "aria-hidden": "true" }, drawn),
  );
}
