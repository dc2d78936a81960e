// Elements and numbers. Text is only ever set as text: nothing that arrives becomes markup.

export const byId = (id) => document.getElementById(id);

/** An element: h("td", {class: "num", onclick: f}, "text", child). */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== undefined && child !== null));
  return element;
}

/** Sets text only where it differs: an unchanged cell is not laid out again. */
export function say(element, text) {
  const wanted = String(text);
  if (element.textContent !== wanted) element.textContent = wanted;
}

export function style(element, name, value) {
  if (element.style.getPropertyValue(name) !== value) element.style.setProperty(name, value);
}

/** Makes `parent`'s children those of `rows` (key -> row), in their order, through `make(row)` -> {element, update(row)}; keeps what stays. */
export class Keyed {
  constructor(parent, make) {
    this.parent = parent;
    this.make = make;
    this.parts = new Map();
  }

  show(rows) {
    for (const [key, part] of this.parts) {
      if (!rows.has(key)) {
        part.element.remove();
        this.parts.delete(key);
      }
    }
    let place = this.parent.firstElementChild;
    for (const [key, row] of rows) {
      let part = this.parts.get(key);
      if (!part) {
        part = this.make(key, row);
        this.parts.set(key, part);
      }
      if (part.row !== row) {
        part.row = row;
        part.update(row);
      }
      if (part.element === place) place = place.nextElementSibling;
      else this.parent.insertBefore(part.element, place);
    }
  }
}

const whole = new Intl.NumberFormat("en-US");

export const count = (value) => whole.format(value);

/** Milliseconds as somebody would say them: 0.42 ms, 7.3 ms, 71 ms, 1.42 s, 3 min 5 s. */
export function time(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms < 1) return `${ms.toFixed(2)} ms`;
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 10000) return `${(ms / 1000).toFixed(2)} s`;
  if (ms < 60000) return `${(ms / 1000).toFixed(1)} s`;
  if (ms < 3600000) return `${Math.floor(ms / 60000)} min ${Math.round((ms % 60000) / 1000)} s`;
  return `${Math.floor(ms / 3600000)} h ${Math.round((ms % 3600000) / 60000)} min`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit && value < 100 ? value.toFixed(value < 10 ? 2 : 1) : Math.round(value)} ${units[unit]}`;
}
