// What the page knows: the last snapshot and every change since.

//: A prompt of so many tokens is long: it is marked, because it is what delays others.
export const LONG = 1024;

const KEPT = 300;
const FAILED_KEPT = 100;
const POINTS = 60;
const WINDOW_MS = 5000;
const DOTS = 24; // of each window of the charts, and as many of those that stand out
const KEYED = ["servers", "pairs", "live", "series"];

export class Store {
  constructor() {
    this.about = {};
    this.counts = null;
    this.causes = [];
    this.problems = [];
    for (const section of KEYED) this[section] = new Map();
    this.ended = new Map(); // number -> request, oldest first
    this.num_kept = 0;
    this.num_failed_kept = 0;
    this.dots = new Map(); // window of the charts -> {usual, special: requests, num}
    this.clock = { now: 0, at: 0, unix: 0 };
  }

  /** Takes one event; returns the names of the sections that changed. */
  take(kind, data) {
    if (kind === "snapshot") return this.begin(data);
    const changed = new Set();
    if (kind === "delta") {
      this.tick(data);
      for (const section of ["about", "counts", "causes", "problems"]) {
        if (section in data) {
          this[section] = data[section];
          changed.add(section);
        }
      }
      for (const section of KEYED) {
        if (section in data) {
          this.change(this[section], data[section]);
          changed.add(section);
        }
      }
      while (this.series.size > POINTS) this.series.delete(this.series.keys().next().value);
    }
    if (data.ended.length) {
      for (const one of data.ended) this.add(one);
      changed.add("ended");
    }
    return changed;
  }

  begin(data) {
    this.tick(data);
    for (const section of ["about", "counts", "causes", "problems"]) this[section] = data[section];
    for (const section of KEYED) this[section] = new Map(Object.entries(data[section]));
    this.ended = new Map();
    this.num_kept = this.num_failed_kept = 0;
    this.dots = new Map();
    return new Set(["about", "counts", "causes", "problems", "ended", ...KEYED]);
  }

  change(rows, { set, gone }) {
    for (const key of gone) rows.delete(key);
    for (const [key, row] of Object.entries(set)) rows.set(key, row);
  }

  add(one) {
    if (this.ended.has(one.n)) return;
    this.ended.set(one.n, one);
    this.sample(one);
    if (one.failure) this.num_failed_kept += 1;
    else this.num_kept += 1;
    if (this.num_kept > KEPT) this.drop(false);
    if (this.num_failed_kept > FAILED_KEPT) this.drop(true);
  }

  /** The charts reach back further than the list: an even sample of each window, and all that is long or failed while there is place. */
  sample(one) {
    const window = Math.floor(one.at / WINDOW_MS);
    const dots = this.dots.get(window) ?? { usual: [], special: [], num: 0 };
    this.dots.set(window, dots);
    while (this.dots.size > POINTS) this.dots.delete(Math.min(...this.dots.keys()));
    if ((one.failure || one.prompt >= LONG) && dots.special.length < DOTS) {
      dots.special.push(one);
      return;
    }
    dots.num += 1;
    const place = dots.usual.length < DOTS ? dots.usual.length : Math.floor(Math.random() * dots.num);
    if (place < DOTS) dots.usual[place] = one;
  }

  drop(failed) {
    for (const [number, one] of this.ended) {
      if (Boolean(one.failure) === failed) {
        this.ended.delete(number);
        if (failed) this.num_failed_kept -= 1;
        else this.num_kept -= 1;
        return;
      }
    }
  }

  tick(data) {
    this.clock = { now: data.now, at: performance.now(), unix: data.unix };
  }

  /** Of the gateway's clock, now. */
  now() {
    return this.clock.now + performance.now() - this.clock.at;
  }

  /** A moment of the gateway's clock as a date. */
  date(at) {
    return new Date(this.clock.unix + at - this.clock.now);
  }
}
