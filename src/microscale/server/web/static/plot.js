// Lines over the last two minutes, as SVG. A value is valid for the time in which it was measured, from one
// reading to the next; where nothing is known, nothing is drawn.

import { h, s } from "/web/dom.js";

const LONGEST = 120; // seconds
const SHORTEST = 20;
const HEIGHT = 150;
const MARGIN = { left: 44, right: 10, top: 10, bottom: 22 };

/** A round number at or above `value`, and a step that divides it. */
function scale(value) {
  const power = 10 ** Math.floor(Math.log10(value || 1));
  const top = [1, 2, 4, 5, 10].map((n) => n * power).find((n) => n >= value * 1.05) ?? 10 * power;
  return { top, step: top / (top / power === 5 ? 5 : 4) };
}

export class Plot {
  /** `series`: name and class of each line; `format`: a value as text. */
  constructor({ title, unit, series, format, least }) {
    this.title = title;
    this.unit = unit;
    this.series = series;
    this.format = format;
    this.least = least;
    this.points = []; // {from, at, values}
    this.end = null; // the right edge: the last reading, or the last try
    this.lost = false; // whether the last try failed
    this.now = h("strong");
    this.svg = s("svg", { role: "img", height: HEIGHT, "aria-label": title });
    const legend = series.length > 1 ? h("span", { class: "legend" }, series.map((line) => h("span", { class: line.class }, line.name))) : "";
    this.element = h("figure", { class: "card plot" }, h("figcaption", {}, h("h2", {}, title), legend, h("span", { class: "now" }, this.now, ` ${unit}`)), this.svg);
    this.hover = null;
    this.svg.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.svg.addEventListener("pointerleave", () => this.point(null));
    new ResizeObserver(() => this.draw()).observe(this.element);
  }

  add(from, at, values) {
    this.points.push({ from, at, values });
    this.move(at, false);
  }

  /** The server was not reached: time goes on without a value. */
  lose(at) {
    this.move(at, true);
  }

  move(at, lost) {
    this.end = at;
    this.lost = lost;
    this.points = this.points.filter((point) => point.at >= at - LONGEST * 1000);
    this.draw();
  }

  point(x) {
    this.hover = x;
    this.draw();
  }

  draw() {
    const width = this.svg.clientWidth || this.element.clientWidth - 40;
    if (width < 80) return;
    const end = this.end ?? performance.now();
    const { top, step } = scale(Math.max(this.least, ...this.points.flatMap((point) => point.values.filter((value) => value !== null))));
    const span = Math.min(LONGEST, Math.max(SHORTEST, (end - (this.points[0]?.from ?? end)) / 1000));
    const x = (at) => MARGIN.left + (width - MARGIN.left - MARGIN.right) * Math.max(1 - (end - at) / (span * 1000), 0);
    const y = (value) => MARGIN.top + (HEIGHT - MARGIN.top - MARGIN.bottom) * (1 - value / top);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.svg.replaceChildren(...this.grid(width, y, top, step, span), ...this.series.flatMap((line, i) => this.line(line, i, x, y)), ...this.cursor(x, width));
    const last = this.lost ? undefined : this.points.at(-1);
    const shown = this.hover === null ? last : this.at(x);
    this.now.textContent = shown ? shown.values.map((value) => (value === null ? "–" : this.format(value))).join(" / ") : "–";
    const latest = last?.values.map((value, i) => `${this.series[i].name} ${value === null ? "unknown" : this.format(value)}`).join(", ");
    this.svg.setAttribute("aria-label", `${this.title} in ${this.unit}, over the last ${Math.round(span)} seconds. Now: ${latest ?? "unknown"}.`);
  }

  grid(width, y, top, step, span) {
    const marks = [];
    for (let value = 0; value <= top * 1.001; value += step) {
      marks.push(s("line", { class: value === 0 ? "axis" : "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(value), y2: y(value) }));
      marks.push(s("text", { x: MARGIN.left - 8, y: y(value) + 3.5, "text-anchor": "end" }, this.format(value)));
    }
    const label = (text, at, anchor) => s("text", { x: at, y: HEIGHT - 5, "text-anchor": anchor }, text);
    return [...marks, label(`${Math.round(span)} s ago`, MARGIN.left, "start"), label("now", width - MARGIN.right, "end")];
  }

  line(line, index, x, y) {
    const drawn = [];
    let run = [];
    const close = () => {
      if (run.length) {
        const path = run.map(([px, py]) => `${px.toFixed(1)},${py.toFixed(1)}`).join("L");
        if (line.area) drawn.push(s("path", { class: `area ${line.class}`, d: `M${run[0][0]},${y(0)}L${path}L${run.at(-1)[0]},${y(0)}Z` }));
        drawn.push(s("path", { class: `line ${line.class}`, d: `M${path}` }));
      }
      run = [];
    };
    let until = null;
    for (const { from, at, values } of this.points) {
      if (values[index] === null || from !== until) close();
      if (values[index] !== null) run.push([x(from), y(values[index])], [x(at), y(values[index])]);
      until = at;
    }
    close();
    return drawn;
  }

  at(x) {
    if (this.hover === null || !this.points.length) return null;
    return this.points.findLast((point) => x(point.from) <= this.hover && this.hover <= x(point.at)) ?? null;
  }

  cursor(x) {
    const point = this.at(x);
    return point ? [s("line", { class: "cursor", x1: this.hover, x2: this.hover, y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom })] : [];
  }
}
