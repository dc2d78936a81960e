// What the page knows: the last snapshot and every change since.

const KEPT = 300;
const FAILED_KEPT = 100;
const POINTS = 60;
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
    return new Set(["about", "counts", "causes", "problems", "ended", ...KEYED]);
  }

  change(rows, { set, gone }) {
    for (const key of gone) rows.delete(key);
    for (const [key, row] of Object.entries(set)) rows.set(key, row);
  }

  add(one) {
    if (this.ended.has(one.n)) return;
    this.ended.set(one.n, one);
    if (one.failure) this.num_failed_kept += 1;
    else this.num_kept += 1;
    if (this.num_kept > KEPT) this.drop(false);
    if (this.num_failed_kept > FAILED_KEPT) this.drop(true);
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
