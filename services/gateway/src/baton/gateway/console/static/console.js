// The page: the feed into the store, the store onto the screen, at most once a frame, the long list twice a second and charts every two.

import { Chart } from "./charts.js";
import { Keyed, byId, count, h, say, style } from "./dom.js";
import { Drain } from "./drain.js";
import { EndedView } from "./ended.js";
import { KeyNeeded, follow } from "./feed.js";
import { FleetView } from "./fleet.js";
import { RoomsView } from "./rooms.js";
import { Store } from "./store.js";
import { Waterfall } from "./waterfall.js";

const KEY = "baton-key";
const CHART_MS = 2000;
const LIST_MS = 500;
const AGE_MS = 500;
const WINDOW_S = 5;

const store = new Store();
const waterfall = new Waterfall();
const drain = new Drain((text) => note(text));
const fleet = new FleetView((row) => drain.ask(row, store.about));
const rooms = new RoomsView();
const ended = new EndedView((one) => waterfall.open(one), () => mark(["ended"]));
const charts = [new Chart("ttft", 3, 4), new Chart("itl", 5, 6)];
const causes = new Keyed(byId("causes"), () => cause());

const dirty = new Set();
let drawing = false;
let chartsAt = -CHART_MS;
let listAt = -LIST_MS;
let listTimer = 0;

function mark(sections) {
  for (const section of sections) dirty.add(section);
  if (drawing || !dirty.size) return;
  drawing = true;
  // A hidden page gets no frames; its numbers are kept right all the same.
  if (document.hidden) setTimeout(draw, 250);
  else requestAnimationFrame(draw);
}

function draw() {
  drawing = false;
  const changed = new Set(dirty);
  dirty.clear();
  if (!store.counts) return;
  if (changed.has("about")) showAbout();
  if (changed.has("counts") || changed.has("series")) showTiles();
  if (changed.has("problems")) showProblems();
  if (changed.has("servers")) fleet.show(store);
  if (changed.has("pairs") || changed.has("about")) fleet.showPairs(store);
  if (changed.has("live") || changed.has("counts")) rooms.show(store);
  if (changed.has("ended")) showEnded();
  if (changed.has("causes")) showCauses();
}

/** Twice a second at most, whatever comes: nobody reads faster, and a list of hundreds is the dearest part to lay out. */
function showEnded() {
  if (listTimer) return;
  const left = listAt + LIST_MS - performance.now();
  const show = () => {
    listTimer = 0;
    listAt = performance.now();
    ended.show(store);
  };
  if (left > 0) listTimer = setTimeout(show, left);
  else show();
}

function showAbout() {
  const about = store.about;
  say(byId("gateway"), about.gateway);
  say(byId("model"), about.model);
  say(byId("version"), `Baton ${about.version}`);
  say(
    byId("scope"),
    about.processes > 1
      ? `Requests, rooms and charts are those of all ${about.processes} processes of this gateway${about.away.length ? `, without those of process ${about.away.join(", ")}, which does not answer now` : ""}.`
      : "Requests, rooms and charts are those of this gateway.",
  );
  status(document.body.dataset.feed);
}

function showTiles() {
  const counts = store.counts;
  for (const [id, value] of [["open", counts.open], ["queued", counts.queued], ["count-ended", counts.ended], ["count-failed", counts.failed + counts.refused], ["count-retried", counts.retried]]) {
    say(byId(id), count(value));
  }
  document.title = counts.open ? `${count(counts.open)} open · Baton` : "Baton";
  byId("count-failed").parentElement.classList.toggle("bad", counts.failed + counts.refused > 0);
  const last = String(Math.floor(store.now() / 1000 / WINDOW_S) - 1);
  const point = store.series.get(last);
  const each = (value) => (value / WINDOW_S).toLocaleString("en-US", { maximumFractionDigits: value / WINDOW_S < 10 ? 1 : 0 });
  say(byId("up"), uptime(store.now() - store.about.started));
  say(byId("rate"), point ? each(point[0]) : "0");
  say(byId("token-rate"), point ? each(point[2]) : "0");
}

function uptime(ms) {
  const minutes = Math.floor(ms / 60000);
  if (minutes < 1) return `${Math.floor(ms / 1000)} s`;
  if (minutes < 60) return `${minutes} min`;
  return minutes < 2880 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min` : `${Math.floor(minutes / 1440)} days`;
}

function showProblems() {
  const place = byId("problems");
  place.hidden = !store.problems.length;
  place.replaceChildren(...store.problems.map((text) => h("li", {}, text)));
}

function showCauses() {
  const most = Math.max(1, ...store.causes.map((row) => row[3]));
  causes.show(new Map(store.causes.map((row) => [row.slice(0, 3).join(" "), { row, share: row[3] / most }])));
  byId("no-causes").hidden = store.causes.length > 0;
}

function cause() {
  const [name, origin, stage, number] = [h("th", { scope: "row", class: "name" }), h("td"), h("td"), h("span")];
  const bar = h("span", { class: "share bad", "aria-hidden": "true" });
  const update = ({ row, share }) => {
    say(name, row[2]);
    say(origin, row[0]);
    say(stage, row[1].toLowerCase());
    say(number, count(row[3]));
    style(bar, "width", `${100 * share}%`);
  };
  return { element: h("tr", {}, name, origin, stage, h("td", { class: "num" }, number, bar)), update };
}

// --- the feed ---------------------------------------------------------------------------------------------------------------------

function status(word) {
  document.body.dataset.feed = word;
  const { ready, draining } = store.about;
  const words = { connecting: "connecting", lost: "the gateway does not answer; trying again", key: "waits for a key" };
  say(byId("status"), words[word] ?? (draining ? "draining" : ready ? "ready" : "not ready"));
  document.body.dataset.ready = word === "live" ? String(Boolean(ready && !draining)) : "unknown";
}

function note(text) {
  say(byId("status"), text);
}

async function watch() {
  const key = sessionStorage.getItem(KEY) || "";
  byId("ask-key").hidden = true;
  byId("main").hidden = false;
  try {
    await follow(key, { state: status, event: (kind, data) => mark(store.take(kind, data)) });
  } catch (error) {
    if (!(error instanceof KeyNeeded)) throw error;
    sessionStorage.removeItem(KEY);
    status("key");
    byId("main").hidden = true;
    byId("ask-key").hidden = false;
    say(byId("key-error"), key ? error.message : "");
    byId("key").focus();
  }
}

byId("ask-key").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key").value.trim());
  byId("key").value = "";
  watch();
});

setInterval(() => {
  if (document.hidden || !store.counts) return;
  rooms.age(store);
  if (performance.now() - chartsAt < CHART_MS) return;
  chartsAt = performance.now();
  showTiles();
  for (const chart of charts) chart.show(store);
}, AGE_MS);

watch();
