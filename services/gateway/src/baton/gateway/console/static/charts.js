// Latencies of the last minutes: a dot a request, lines for p50 and p99, on a logarithmic scale.

import { byId, count, say, svg, time } from "./dom.js";
import { LONG } from "./store.js";

const MINUTE_MS = 60000;
const MAX_MINUTES = 5;
const WINDOW_MS = 5000;
const HEIGHT = 190;
const [LEFT, RIGHT, TOP, BOTTOM] = [46, 30, 8, 20];

export class Chart {
  /** name: "ttft" or "itl"; p50, p99: where these are in a point of the series. */
  constructor(name, p50, p99) {
    this.name = name;
    this.columns = { p50, p99 };
    this.place = byId(`${name}-chart`);
    this.note = byId(`${name}-now`);
    this.width = 0;
    new ResizeObserver(([entry]) => {
      this.width = Math.round(entry.contentRect.width);
      this.draw();
    }).observe(this.place);
  }

  show(store) {
    this.store = store;
    this.draw();
  }

  draw() {
    if (!this.store || this.width < 60) return;
    const now = this.store.now();
    // As far back as there is anything, in whole minutes.
    const since = Math.min(now, ...[...this.store.series].filter(([, point]) => point[0]).map(([number]) => Number(number) * WINDOW_MS));
    this.minutes = Math.min(MAX_MINUTES, Math.max(1, Math.ceil((now - since) / MINUTE_MS)));
    const oldest = now - this.minutes * MINUTE_MS;
    const dots = [...this.store.dots.values()].flatMap(({ usual, special }) => [...usual, ...special]).filter((one) => one[this.name] > 0 && one.at > oldest);
    const points = [...this.store.series].map(([number, point]) => ({
      at: Math.min(now, (Number(number) + 0.5) * WINDOW_MS),
      p50: point[this.columns.p50],
      p99: point[this.columns.p99],
    })).filter((point) => point.p50 !== null && point.at > oldest);
    const values = [...dots.map((one) => one[this.name]), ...points.flatMap((point) => [point.p50, point.p99])];
    const scale = this.scale(values, now);
    this.place.replaceChildren(this.picture(dots, points, scale));
    this.summary(points.at(-1), dots);
  }

  scale(values, now) {
    // One in a hundred may lie below: a single odd one does not squeeze all others together.
    const sorted = Float64Array.from(values).sort();
    let [low, high] = values.length ? [sorted[Math.floor(values.length / 100)], sorted.at(-1)] : [1, 1000];
    low = 10 ** Math.floor(Math.log10(low));
    high = Math.max(10 ** Math.ceil(Math.log10(high)), low * 10);
    const [width, height] = [this.width - LEFT - RIGHT, HEIGHT - TOP - BOTTOM];
    const decades = Math.log10(high / low);
    return {
      low,
      high,
      x: (at) => LEFT + width * (1 - (now - at) / this.minutes / MINUTE_MS),
      y: (value) => TOP + height * (1 - Math.log10(Math.max(value, low) / low) / decades),
    };
  }

  picture(dots, points, scale) {
    const picture = svg("svg", { width: this.width, height: HEIGHT, viewBox: `0 0 ${this.width} ${HEIGHT}`, role: "img" });
    picture.setAttribute("aria-labelledby", `h-${this.name} ${this.name}-now`);
    for (let value = scale.low; value <= scale.high * 1.0001; value *= 10) {
      const y = scale.y(value);
      picture.append(
        svg("line", { class: "grid", x1: LEFT, x2: this.width - RIGHT, y1: y, y2: y }),
        svg("text", { class: "tick", x: LEFT - 6, y: y + 3.5, "text-anchor": "end" }, short(value)),
      );
    }
    const marks = this.minutes === 1 ? [60, 45, 30, 15, 0] : Array.from({ length: this.minutes + 1 }, (_, index) => 60 * (this.minutes - index));
    const step = this.width < 420 && marks.length > 4 ? 2 : 1;
    marks.forEach((seconds, index) => {
      if ((marks.length - 1 - index) % step) return;
      const x = LEFT + (this.width - LEFT - RIGHT) * (1 - seconds / this.minutes / 60);
      const anchor = index === 0 ? "start" : seconds === 0 ? "end" : "middle";
      const text = seconds === 0 ? "now" : this.minutes === 1 ? `−${seconds} s` : `−${seconds / 60} min`;
      picture.append(svg("text", { class: "tick", x, y: HEIGHT - 5, "text-anchor": anchor }, text));
    });
    for (const one of dots) picture.append(dot(one, scale.x(one.at), scale.y(one[this.name])));
    for (const name of ["p99", "p50"]) {
      for (const path of pieces(points, name, scale)) picture.append(svg("path", { class: `line ${name}`, d: path }));
    }
    picture.append(...names(points.at(-1), scale));
    return picture;
  }

  summary(last, dots) {
    const long = dots.filter((one) => one.prompt >= LONG).length;
    const parts = last ? [`p50 ${time(last.p50)}`, `p99 ${time(last.p99)}`] : ["nothing yet"];
    parts.push(long ? `◆ ${long} long ${long === 1 ? "prompt" : "prompts"}` : `◆ prompts from ${count(LONG)} tokens`);
    say(this.note, parts.join(" · "));
  }
}

function dot(one, x, y) {
  const kind = one.failure ? "dot failed" : "dot";
  if (one.prompt < LONG) return svg("circle", { class: kind, cx: x.toFixed(1), cy: y.toFixed(1), r: 2 });
  return svg("path", { class: `${kind} long`, d: `M${x.toFixed(1)} ${(y - 5).toFixed(1)}l5 5-5 5-5-5z` });
}

/** Each line says which it is, the upper one a little higher where both end at the same place. */
function names(last, scale) {
  if (!last) return [];
  const low = Math.max(scale.y(last.p50) + 3.5, TOP + 20);
  const high = Math.min(scale.y(last.p99) + 3.5, low - 11);
  const x = scale.x(last.at) + 5;
  return [svg("text", { class: "name-of-line", x, y: low }, "p50"), svg("text", { class: "name-of-line", x, y: high }, "p99")];
}

/** A line for each run of points without a gap; a point alone is a short dash. */
function pieces(points, name, scale) {
  const found = [];
  let before = null;
  for (const point of points) {
    const place = `${scale.x(point.at).toFixed(1)} ${scale.y(point[name]).toFixed(1)}`;
    if (before && point.at - before.at <= 2 * WINDOW_MS) found[found.length - 1] += `L${place}`;
    else found.push(`M${place}h1`);
    before = point;
  }
  return found;
}

function short(ms) {
  if (ms < 1) return `${Math.round(ms * 1000)} µs`;
  return ms < 1000 ? `${Math.round(ms)} ms` : `${Math.round(ms / 1000)} s`;
}
