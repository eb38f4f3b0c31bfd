// Curves on canvases: one shared range of steps, one shared cursor, marks of what happened.

import { short } from "./format.js";

const PAD = { left: 46, right: 10, top: 10, bottom: 20 };
const MARK_ALPHA = 0.75;
const DRAG_PX = 6; // a shorter drag is a click

// Debiased exponential mean; missing values are passed over.
function smoothed(values, weight) {
  let sum = 0;
  let norm = 0;
  return values.map((v) => {
    if (v === null) return null;
    sum = sum * weight + v * (1 - weight);
    norm = norm * weight + (1 - weight);
    return sum / norm;
  });
}

function ticks(low, high, count) {
  const raw = (high - low || 1) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const unit = [1, 2, 5, 10].find((m) => m * power >= raw) * power;
  const found = [];
  for (let v = Math.ceil(low / unit) * unit; v <= high + unit * 1e-6; v += unit)
    found.push(Math.abs(v) < unit * 1e-6 ? 0 : v);
  return found;
}

// Lowest and highest of all finite values, with some room; null without any.
function extent(lines, evals, floor) {
  let low = Infinity;
  let high = -Infinity;
  const values = lines.flatMap((line) => [line.low, line.high]);
  for (const side of [...values, ...evals.map((of) => of.points.map((p) => p.value))])
    for (const v of side) {
      if (v === null) continue;
      if (v < low) low = v;
      if (v > high) high = v;
    }
  if (!Number.isFinite(low)) return null;
  const room = (high - low || Math.abs(high) || 1) * 0.08;
  // A line that is 0 throughout would lie on the axis, and look like none.
  const bottom = floor === 0 && low >= 0 && high > 0 ? Math.max(0, low - room) : low - room;
  return [bottom, high + room];
}

function nearest(x, cursor) {
  let a = 0;
  let b = x.length - 1;
  while (a < b) {
    const middle = (a + b) >> 1;
    if (x[middle] < cursor) a = middle + 1;
    else b = middle;
  }
  return a > 0 && cursor - x[a - 1] < x[a] - cursor ? a - 1 : a;
}

export class Chart {
  // spec: { title, lines: [{ name, label }], evals: [{ name, label }] of the evaluations, unit, floor }
  // board: { range, cursor, weight, marks, data, redraw(), zoom(from, to) }
  constructor(spec, board) {
    this.spec = spec;
    this.board = board;
    this.element = document.createElement("figure");
    this.element.className = "chart";
    const caption = document.createElement("figcaption");
    const title = document.createElement("h3");
    title.textContent = spec.unit ? `${spec.title}, ${spec.unit}` : spec.title;
    this.now = document.createElement("span");
    this.now.className = "now";
    caption.append(title, this.now);
    this.canvas = document.createElement("canvas");
    this.canvas.setAttribute("role", "img");
    this.element.append(caption, this.canvas);
    this.plot = null; // steps and pixels of the last drawing
    this.drag = null;
    this.listen();
  }

  listen() {
    const { canvas, board } = this;
    const at = (e) => this.stepAt(e.clientX - canvas.getBoundingClientRect().left);
    canvas.addEventListener("pointerdown", (e) => {
      if (e.button !== 0) return;
      canvas.setPointerCapture(e.pointerId);
      this.drag = [at(e), at(e)];
    });
    canvas.addEventListener("pointermove", (e) => {
      board.cursor = at(e);
      if (this.drag) this.drag[1] = at(e);
      board.redraw();
    });
    canvas.addEventListener("pointerleave", () => {
      board.cursor = null;
      board.redraw();
    });
    canvas.addEventListener("pointercancel", () => {
      this.drag = null;
      board.redraw();
    });
    canvas.addEventListener("pointerup", () => {
      const { drag } = this;
      this.drag = null;
      if (!drag) return;
      const [a, b] = [Math.min(...drag), Math.max(...drag)].map(Math.round);
      if (this.plot && Math.abs(this.xOf(b) - this.xOf(a)) > DRAG_PX && b > a) board.zoom(a, b);
      else board.redraw();
    });
    canvas.addEventListener("dblclick", () => board.zoom(null, null));
  }

  stepAt(px) {
    if (!this.plot) return 0;
    const { x0, x1, w } = this.plot;
    return Math.min(x1, Math.max(x0, x0 + ((px - PAD.left) / w) * (x1 - x0)));
  }

  xOf(step) {
    const { x0, x1, w } = this.plot;
    return PAD.left + ((step - x0) / (x1 - x0 || 1)) * w;
  }

  yOf(value) {
    const { low, high, h } = this.plot;
    return PAD.top + (1 - (value - low) / (high - low)) * h;
  }

  draw(colours) {
    const width = this.canvas.clientWidth;
    const height = this.canvas.clientHeight;
    if (!width) return;
    const g = this.cleared(width, height, colours);
    const lines = this.lines();
    const { x } = this.board.data;
    const evals = this.evals();
    const starts = evals.flatMap((of) => of.points.slice(0, 1).map((p) => p.step));
    const first = this.board.range ? x[0] : Math.min(x[0] ?? 0, ...starts);
    const x0 = x.length ? first : 0;
    const last = x.length ? x[x.length - 1] : 1;
    const within = (p) => p.step >= x0 && p.step <= last;
    const alone = evals.length === 1 || lines.length > 0;
    const shown = evals.map((of, n) => ({
      ...of,
      points: of.points.filter(within),
      colour: colours.lines[alone ? 1 : n],
    }));
    const range = extent(lines, shown, this.spec.floor);
    const [low, high] = range ?? [0, 1];
    const w = width - PAD.left - PAD.right;
    const h = height - PAD.top - PAD.bottom;
    this.plot = { x0, x1: last === x0 ? x0 + 1 : last, w, h, low, high, width, height };
    if (!range) {
      this.drawMissing(g, colours);
      return;
    }
    this.drawAxes(g, colours);
    g.save();
    g.beginPath();
    g.rect(PAD.left, 0, w, height - PAD.bottom + 1);
    g.clip();
    this.drawMarks(g, colours, last);
    lines.forEach((line, n) => {
      this.drawLine(g, line, n, colours);
    });
    if (this.drag) {
      const a = this.xOf(this.drag[0]);
      g.fillStyle = colours.band;
      g.fillRect(a, PAD.top, this.xOf(this.drag[1]) - a, h);
    }
    g.restore();
    // Not clipped: a point at the edge is a whole circle.
    for (const of of shown) this.drawEvals(g, of.points, of.colour, colours.sheet);
    this.label(g, lines, shown, colours);
  }

  cleared(width, height, colours) {
    const ratio = window.devicePixelRatio || 1;
    const [columns, rows] = [Math.round(width * ratio), Math.round(height * ratio)];
    if (this.canvas.width !== columns || this.canvas.height !== rows) {
      this.canvas.width = columns;
      this.canvas.height = rows;
    }
    const g = this.canvas.getContext("2d");
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.clearRect(0, 0, width, height);
    g.font = `11px ${colours.font}`;
    return g;
  }

  lines() {
    const { data, weight } = this.board;
    return this.spec.lines.map((line) => {
      const raw = data.series[line.name] || [];
      const low = data.low[line.name];
      return {
        ...line,
        raw,
        low: low || raw,
        high: data.high[line.name] || raw,
        banded: Boolean(low),
        smooth: weight > 0 ? smoothed(raw, weight) : raw,
      };
    });
  }

  // Evaluations that have a metric of the chart, as points { step, value }.
  evals() {
    const { evals } = this.board.data;
    return (this.spec.evals ?? []).map((of) => ({ ...of, points: scoresOf(evals, of.name) }));
  }

  drawMissing(g, colours) {
    g.fillStyle = colours.soft;
    g.textAlign = "center";
    g.fillText("not measured yet", this.plot.width / 2, this.plot.height / 2);
    this.now.textContent = "";
    this.canvas.setAttribute("aria-label", `${this.spec.title}: not measured yet`);
  }

  drawAxes(g, colours) {
    const { x0, x1, w, low, high, width, height } = this.plot;
    g.textAlign = "right";
    g.textBaseline = "middle";
    g.lineWidth = 1;
    g.strokeStyle = colours.hair;
    g.fillStyle = colours.soft;
    for (const v of ticks(low, high, height > 200 ? 6 : 4)) {
      const y = Math.round(this.yOf(v)) + 0.5;
      segment(g, PAD.left, y, width - PAD.right, y);
      g.fillText(short(v), PAD.left - 7, y);
    }
    g.textAlign = "center";
    g.textBaseline = "alphabetic";
    for (const v of ticks(x0, x1, Math.max(2, Math.floor(w / 90)))) {
      if (!Number.isInteger(v)) continue;
      const text = v.toLocaleString("en");
      const half = g.measureText(text).width / 2;
      g.fillText(text, Math.min(this.xOf(v), width - half - 1), height - 5);
    }
  }

  drawMarks(g, colours, last) {
    const { x0, height } = this.plot;
    const bottom = height - PAD.bottom;
    g.globalAlpha = MARK_ALPHA;
    for (const mark of this.board.marks) {
      // What happened before the first curve's point stands at its beginning.
      if ((mark.step < x0 && this.board.range) || mark.step > last) continue;
      const px = Math.round(this.xOf(Math.max(x0, mark.step))) + 0.5;
      g.strokeStyle = colours[mark.kind];
      g.lineWidth = mark.kind === "fault" ? 1.25 : 1;
      segment(g, px, mark.kind === "checkpoint" ? bottom - 6 : PAD.top, px, bottom);
    }
    g.globalAlpha = 1;
  }

  drawLine(g, line, n, colours) {
    const colour = colours.lines[n];
    if (line.banded) this.drawBand(g, line, n ? "transparent" : colours.band);
    else if (this.board.weight > 0) {
      g.globalAlpha = 0.28;
      this.stroke(g, line.raw, colour, 1);
      g.globalAlpha = 1;
    }
    this.stroke(g, line.smooth, colour, 1.75);
  }

  drawBand(g, line, colour) {
    const { x } = this.board.data;
    g.fillStyle = colour;
    g.beginPath();
    x.forEach((step, i) => {
      if (line.high[i] !== null) g.lineTo(this.xOf(step), this.yOf(line.high[i]));
    });
    for (let i = x.length - 1; i >= 0; i--)
      if (line.low[i] !== null) g.lineTo(this.xOf(x[i]), this.yOf(line.low[i]));
    g.fill();
  }

  stroke(g, values, colour, width) {
    g.strokeStyle = colour;
    g.lineWidth = width;
    g.lineJoin = "round";
    g.beginPath();
    let pen = false;
    this.board.data.x.forEach((step, i) => {
      const v = values[i];
      const known = v !== null && v !== undefined;
      if (known && pen) g.lineTo(this.xOf(step), this.yOf(v));
      else if (known) g.moveTo(this.xOf(step), this.yOf(v));
      pen = known;
    });
    g.stroke();
  }

  drawEvals(g, evals, colour, sheet) {
    const points = evals.map((e) => [this.xOf(e.step), this.yOf(e.value)]);
    g.strokeStyle = colour;
    g.fillStyle = sheet;
    g.lineWidth = 1.25;
    g.setLineDash([3, 3]);
    g.beginPath();
    for (const [px, py] of points) g.lineTo(px, py);
    g.stroke();
    g.setLineDash([]);
    g.lineWidth = 2;
    for (const [px, py] of points) {
      disc(g, px, py, 3.5);
      g.stroke();
    }
  }

  // The steps that a point stands for: one, or those up to it from the point before.
  span(index) {
    const { range, data } = this.board;
    const { x, low } = data;
    if (!Object.keys(low).length) return `step ${x[index]}`;
    const start = range ? Math.max(1, range[0]) : 1;
    const first = index ? x[index - 1] + 1 : start;
    return first < x[index] ? `steps ${first}–${x[index]}, mean` : `step ${x[index]}`;
  }

  label(g, lines, evals, colours) {
    const { data, cursor } = this.board;
    const { x } = data;
    const pointed = cursor !== null;
    const index = pointed && x.length ? nearest(x, cursor) : x.length - 1;
    if (pointed && x.length) this.drawCursor(g, index, lines, colours);
    const many = lines.length > 1;
    const values = lines.map((l) => `${many ? `${l.label} ` : ""}${short(l.raw[index])}`);
    const inks = lines.map((_, n) => (many ? colours.lines[n] : ""));
    for (const { label, points, colour } of evals) {
      const held = points.filter((e) => e.step <= x[index]).at(-1);
      if (!held) continue;
      values.push(`${label} ${short(held.value)}`);
      inks.push(colour);
    }
    const at = this.span(index);
    this.say(pointed ? `${at}: ` : "", values, inks);
    if (pointed) return;
    const unit = this.spec.unit ? ` ${this.spec.unit}` : "";
    const words = `${this.spec.title} at ${at}: ${values.join(", ")}${unit}`;
    this.canvas.setAttribute("aria-label", words);
  }

  // The values at the cursor, each in the colour of its curve.
  say(at, values, inks) {
    const spans = values.map((text, n) => {
      const span = document.createElement("span");
      span.textContent = n ? `   ${text}` : text;
      span.style.color = inks[n];
      return span;
    });
    this.now.replaceChildren(at, ...spans);
  }

  drawCursor(g, index, lines, colours) {
    const px = Math.round(this.xOf(this.board.data.x[index])) + 0.5;
    g.strokeStyle = colours.soft;
    g.globalAlpha = 0.5;
    g.lineWidth = 1;
    segment(g, px, PAD.top, px, this.plot.height - PAD.bottom);
    g.globalAlpha = 1;
    lines.forEach((line, n) => {
      const v = line.smooth[index];
      if (v === null || v === undefined) return;
      g.fillStyle = colours.lines[n];
      disc(g, px, this.yOf(v), 3);
    });
  }
}

const scoresOf = (evals, name) =>
  evals.map((e) => ({ step: e.step, value: e[name] ?? null })).filter((e) => e.value !== null);

function segment(g, fromX, fromY, toX, toY) {
  g.beginPath();
  g.moveTo(fromX, fromY);
  g.lineTo(toX, toY);
  g.stroke();
}

function disc(g, x, y, radius) {
  g.beginPath();
  g.arc(x, y, radius, 0, 7);
  g.fill();
}
