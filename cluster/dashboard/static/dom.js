// Elements from plain values. Text is only ever set as text: whatever a client called its request,
// it cannot become markup (and the page's policy forbids it too).

/** An element with properties, data-… of `data`, and children: elements, strings, numbers. */
export function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "data") Object.assign(node.dataset, value);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.filter((child) => child !== null && child !== undefined).map(asNode));
  return node;
}

function asNode(child) {
  return child instanceof Node ? child : document.createTextNode(String(child));
}

export const byId = (id) => document.getElementById(id);

/** A table; a column is {title, value, number}; the first one names its row. */
export function table(caption, columns, rows) {
  const kind = (column) => (column.number ? "number" : null);
  const head = el("tr", {}, ...columns.map((c) => el("th", { scope: "col", class: kind(c) }, c.title)));
  const body = rows.map((row) =>
    el("tr", {}, ...columns.map((column, place) => {
      const text = column.value(row);
      return place === 0
        ? el("th", { scope: "row" }, text)
        : el("td", { class: kind(column), title: text instanceof Node ? null : text }, text);
    })));
  return el("table", {}, el("caption", {}, caption), el("thead", {}, head), el("tbody", {}, ...body));
}

export const whole = (value) => Math.round(value).toLocaleString("en-US");

export function short(value) {
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(0)}k`;
  return whole(value);
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  if (value < 0.0995) return `${(value * 1e3).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  if (value < 99.5) return `${value.toFixed(value < 9.95 ? 2 : 1)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  if (value < 172800) return `${Math.round(value / 3600)} h`;
  return `${Math.round(value / 86400)} d`;
}

export const percent = (part, all) => (all > 0 ? `${((100 * part) / all).toFixed(0)} %` : "–");

/** The value of a style's variable now: themes change it. */
export const shade = (name) =>
  getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** A canvas of so many CSS pixels, sharp on any screen; its context speaks CSS pixels. */
export function sized(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}
