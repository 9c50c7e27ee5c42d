// Three charts of the last five minutes. Each says its newest values as text, and tells a screen
// reader its range; where it has two lines, one is dashed.

import { byId, el, seconds, shade, short, sized } from "./dom.js";

const MAX_POINTS = 300;

const CHARTS = [
  {
    title: "Time to first token", lines: ["p50", "p99"], format: seconds, colour: "referenced",
    values: (update) => [update.rates.ttft_p50_s, update.rates.ttft_p99_s],
  },
  {
    title: "Output tokens per second", lines: ["all clients of this gateway"], colour: "shared", least: 10,
    format: short, values: (update) => [update.rates.tokens_per_s],
  },
  {
    title: "Prefix hit rate", lines: ["of prompt tokens, all replicas"], colour: "cached", most: 1,
    format: (value) => (value === null ? "–" : `${(100 * value).toFixed(0)} %`),
    values: (update) => [update.rates.query_tokens ? update.rates.hit_tokens / update.rates.query_tokens : null],
  },
];

export class Charts {
  constructor() {
    this.charts = CHARTS.map((chart) => ({
      ...chart,
      points: [],
      value: el("p", { class: "value" }, "–"),
      canvas: el("canvas", { role: "img", "aria-label": chart.title }),
    }));
    byId("charts").replaceChildren(...this.charts.map((chart) =>
      el("article", { class: "panel chart" },
        el("div", { class: "panel-head" }, el("h2", {}, chart.title), chart.value), chart.canvas)));
    new ResizeObserver(() => this.draw()).observe(byId("charts"));
  }

  update(update) {
    for (const chart of this.charts) {
      chart.points.push(chart.values(update));
      if (chart.points.length > MAX_POINTS) chart.points.shift();
      this.tell(chart);
    }
    this.draw();
  }

  tell(chart) {
    const now = chart.points.at(-1);
    const rest = chart.lines.length > 1
      ? chart.lines.slice(1).map((name, i) => `${name} ${chart.format(now[i + 1])}`).join(", ")
      : "";
    const note = chart.lines.length > 1 ? `${chart.lines[0]} · ${rest} (dashed)` : chart.lines[0];
    chart.value.replaceChildren(chart.format(now[0]), el("small", {}, note));
    const known = chart.points.map((point) => point[0]).filter((value) => value !== null);
    const range = known.length
      ? `, between ${chart.format(Math.min(...known))} and ${chart.format(Math.max(...known))} in the time shown`
      : "";
    chart.canvas.setAttribute("aria-label", `${chart.title}: ${chart.lines[0]} ${chart.format(now[0])} ${rest}${range}`);
  }

  draw() {
    for (const chart of this.charts) if (chart.canvas.clientWidth) this.drawOne(chart);
  }

  drawOne(chart) {
    const [width, height] = [chart.canvas.clientWidth, 84];
    const context = sized(chart.canvas, width, height);
    const values = chart.points.flat().filter((value) => value !== null);
    const most = chart.most ?? niceTop(Math.max(chart.least ?? 0, ...values));
    const [left, right, top, bottom] = [0, width - 44, 6, height - 8];
    const x = (index) => right - ((chart.points.length - 1 - index) * (right - left)) / (MAX_POINTS - 1);
    const y = (value) => bottom - ((bottom - top) * Math.min(value, most)) / (most || 1);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    for (const part of [0, 0.5, 1]) {
      context.strokeStyle = shade("grid");
      context.lineWidth = 1;
      context.beginPath();
      context.moveTo(left, Math.round(y(part * most)) + 0.5);
      context.lineTo(right, Math.round(y(part * most)) + 0.5);
      context.stroke();
      context.fillStyle = shade("dim");
      context.fillText(chart.format(part * most), right + 6, y(part * most));
    }
    chart.lines.forEach((_, line) => this.drawLine(context, chart, line, x, y, bottom));
  }

  drawLine(context, chart, line, x, y, bottom) {
    context.strokeStyle = context.fillStyle = shade(chart.colour);
    context.lineWidth = line ? 1.2 : 1.8;
    context.setLineDash(line ? [4, 3] : []);
    let run = [];
    const flush = () => {
      if (run.length) {
        context.beginPath();
        run.forEach(([px, py], i) => (i ? context.lineTo(px, py) : context.moveTo(px, py)));
        if (run.length === 1) context.arc(run[0][0], run[0][1], 1, 0, 2 * Math.PI);
        context.stroke();
        if (!line && run.length > 1) {
          context.lineTo(run.at(-1)[0], bottom);
          context.lineTo(run[0][0], bottom);
          context.globalAlpha = 0.13;
          context.fill();
          context.globalAlpha = 1;
        }
      }
      run = [];
    };
    chart.points.forEach((point, index) => {
      if (point[line] === null || point[line] === undefined) flush();
      else run.push([x(index), y(point[line])]);
    });
    flush();
    context.setLineDash([]);
  }
}

/** 1, 2 or 5 times a power of ten, not below the value. */
function niceTop(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}
