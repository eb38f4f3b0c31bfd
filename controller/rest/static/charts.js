// Curves on canvases: one shared range of steps, one shared cursor, marks of what happened.
"use strict";

const Charts = (() => {
  const PAD = { left: 46, right: 10, top: 10, bottom: 20 };

  // Debiased exponential mean; missing values are passed over.
  function smoothed(values, weight) {
    let sum = 0, norm = 0;
    return values.map((v) => {
      if (v === null) return null;
      sum = sum * weight + v * (1 - weight);
      norm = norm * weight + (1 - weight);
      return sum / norm;
    });
  }

  function ticks(low, high, count) {
    const span = high - low || 1;
    const raw = span / count;
    const power = 10 ** Math.floor(Math.log10(raw));
    const unit = [1, 2, 5, 10].find((m) => m * power >= raw) * power;
    const found = [];
    for (let v = Math.ceil(low / unit) * unit; v <= high + unit * 1e-6; v += unit) found.push(Math.abs(v) < unit * 1e-6 ? 0 : v);
    return found;
  }

  function short(v) {
    if (v === null || v === undefined || Number.isNaN(v)) return "–";
    const a = Math.abs(v);
    if (a !== 0 && (a < 0.001 || a >= 1e7)) return v.toExponential(1);
    if (a >= 10000) return Math.round(v).toLocaleString("en");
    return String(+v.toPrecision(a >= 1000 ? 5 : 3));
  }

  class Chart {
    // spec: { title, lines: [{ name, label }], evals, unit }; board: { range, cursor, weight, marks, data, changed }
    constructor(spec, board) {
      this.spec = spec;
      this.board = board;
      this.element = document.createElement("figure");
      this.element.className = spec.lead ? "chart lead" : "chart";
      const caption = document.createElement("figcaption");
      const title = document.createElement("h3");
      title.textContent = spec.title;
      this.now = document.createElement("span");
      this.now.className = "now";
      caption.append(title, this.now);
      this.canvas = document.createElement("canvas");
      this.canvas.setAttribute("role", "img");
      this.element.append(caption, this.canvas);
      this.drag = null;
      this.listen();
    }

    listen() {
      const c = this.canvas;
      const at = (e) => this.stepAt(e.clientX - c.getBoundingClientRect().left);
      c.addEventListener("pointerdown", (e) => { if (e.button === 0) { c.setPointerCapture(e.pointerId); this.drag = [at(e), at(e)]; } });
      c.addEventListener("pointermove", (e) => { this.board.cursor = at(e); if (this.drag) this.drag[1] = at(e); this.board.redraw(); });
      c.addEventListener("pointerleave", () => { this.board.cursor = null; this.board.redraw(); });
      c.addEventListener("pointercancel", () => { this.drag = null; this.board.redraw(); });
      c.addEventListener("pointerup", () => {
        const drag = this.drag;
        this.drag = null;
        if (!drag) return;
        const [a, b] = [Math.min(...drag), Math.max(...drag)].map(Math.round);
        if (this.plot && Math.abs(this.xOf(b) - this.xOf(a)) > 6 && b > a) this.board.zoom(a, b);
        else this.board.redraw();
      });
      c.addEventListener("dblclick", () => this.board.zoom(null, null));
    }

    stepAt(px) {
      if (!this.plot) return 0;
      const { x0, x1, w } = this.plot;
      return Math.min(x1, Math.max(x0, x0 + ((px - PAD.left) / w) * (x1 - x0)));
    }

    xOf(step) { const { x0, x1, w } = this.plot; return PAD.left + ((step - x0) / (x1 - x0 || 1)) * w; }

    draw(colours) {
      const { data, marks, weight } = this.board;
      const c = this.canvas, ratio = window.devicePixelRatio || 1;
      const width = c.clientWidth, height = c.clientHeight;
      if (!width) return;
      if (c.width !== Math.round(width * ratio) || c.height !== Math.round(height * ratio)) { c.width = Math.round(width * ratio); c.height = Math.round(height * ratio); }
      const g = c.getContext("2d");
      g.setTransform(ratio, 0, 0, ratio, 0, 0);
      g.clearRect(0, 0, width, height);
      g.font = "11px " + colours.font;
      const w = width - PAD.left - PAD.right, h = height - PAD.top - PAD.bottom;
      const x = data.x;
      const first = !this.board.range && data.evals.length ? Math.min(x[0] ?? 0, data.evals[0].step) : x[0];
      const x0 = x.length ? first : 0, x1 = x.length ? x[x.length - 1] : 1;
      this.plot = { x0, x1: x1 === x0 ? x0 + 1 : x1, w };
      const lines = this.spec.lines.map((line) => {
        const raw = data.series[line.name] || [];
        const banded = data.low[line.name];
        return { ...line, raw, low: banded || raw, high: data.high[line.name] || raw, banded: Boolean(banded), smooth: weight > 0 ? smoothed(raw, weight) : raw };
      });
      const evals = this.spec.evals ? data.evals.filter((e) => e.step >= x0 && e.step <= x1 && e.eval_reward_mean !== null) : [];
      let low = Infinity, high = -Infinity;
      for (const line of lines) for (const side of [line.low, line.high]) for (const v of side) if (v !== null) { if (v < low) low = v; if (v > high) high = v; }
      for (const e of evals) { low = Math.min(low, e.eval_reward_mean); high = Math.max(high, e.eval_reward_mean); }
      if (!Number.isFinite(low)) {
        g.fillStyle = colours.soft; g.textAlign = "center"; g.fillText("not measured yet", width / 2, height / 2);
        this.now.textContent = ""; c.setAttribute("aria-label", `${this.spec.title}: not measured yet`);
        return;
      }
      const room = (high - low || Math.abs(high) || 1) * 0.08;
      low = this.spec.floor === 0 && low >= 0 ? Math.max(0, low - room) : low - room;
      high += room;
      const yOf = (v) => PAD.top + (1 - (v - low) / (high - low)) * h;
      g.textAlign = "right"; g.textBaseline = "middle"; g.lineWidth = 1;
      for (const v of ticks(low, high, height > 200 ? 6 : 4)) {
        const y = Math.round(yOf(v)) + 0.5;
        g.strokeStyle = colours.hair; g.beginPath(); g.moveTo(PAD.left, y); g.lineTo(width - PAD.right, y); g.stroke();
        g.fillStyle = colours.soft; g.fillText(short(v), PAD.left - 7, y);
      }
      g.textAlign = "center"; g.textBaseline = "alphabetic";
      for (const v of ticks(this.plot.x0, this.plot.x1, Math.max(2, Math.floor(w / 90)))) if (Number.isInteger(v)) g.fillText(v.toLocaleString("en"), this.xOf(v), height - 5);
      g.save(); g.beginPath(); g.rect(PAD.left, 0, w, height - PAD.bottom + 1); g.clip();
      for (const mark of marks) {
        // What happened before the first curve's point stands at its beginning.
        if ((mark.step < x0 && this.board.range) || mark.step > x1) continue;
        const px = Math.round(this.xOf(Math.max(x0, mark.step))) + 0.5;
        g.strokeStyle = colours[mark.kind]; g.globalAlpha = mark.kind === "checkpoint" ? 0.7 : 0.75; g.lineWidth = mark.kind === "fault" ? 1.25 : 1;
        g.beginPath(); g.moveTo(px, mark.kind === "checkpoint" ? height - PAD.bottom - 6 : PAD.top); g.lineTo(px, height - PAD.bottom); g.stroke();
      }
      g.globalAlpha = 1;
      lines.forEach((line, n) => {
        const colour = colours.lines[n];
        if (line.banded) {
          g.fillStyle = n ? "transparent" : colours.band;
          g.beginPath();
          let open = false;
          x.forEach((s, i) => { if (line.high[i] !== null) { if (open) g.lineTo(this.xOf(s), yOf(line.high[i])); else g.moveTo(this.xOf(s), yOf(line.high[i])); open = true; } });
          for (let i = x.length - 1; i >= 0; i--) if (line.low[i] !== null) g.lineTo(this.xOf(x[i]), yOf(line.low[i]));
          g.fill();
        } else if (weight > 0) { g.globalAlpha = 0.28; this.stroke(g, x, line.raw, yOf, colour, 1); g.globalAlpha = 1; }
        this.stroke(g, x, line.smooth, yOf, colour, 1.75);
      });
      if (evals.length) {
        g.strokeStyle = colours.lines[1]; g.fillStyle = colours.sheet; g.lineWidth = 1.25; g.setLineDash([3, 3]); g.beginPath();
        evals.forEach((e, i) => { const p = [this.xOf(e.step), yOf(e.eval_reward_mean)]; if (i) g.lineTo(...p); else g.moveTo(...p); });
        g.stroke(); g.setLineDash([]); g.lineWidth = 2;
        for (const e of evals) { g.beginPath(); g.arc(this.xOf(e.step), yOf(e.eval_reward_mean), 3.5, 0, 7); g.fill(); g.stroke(); }
      }
      if (this.drag) { g.fillStyle = colours.band; const a = this.xOf(this.drag[0]); g.fillRect(a, PAD.top, this.xOf(this.drag[1]) - a, h); }
      g.restore();
      this.label(g, lines, evals, colours, yOf, height);
    }

    stroke(g, x, values, yOf, colour, width) {
      g.strokeStyle = colour; g.lineWidth = width; g.lineJoin = "round"; g.beginPath();
      let pen = false;
      x.forEach((s, i) => { const v = values[i]; if (v === null || v === undefined) { pen = false; return; } if (pen) g.lineTo(this.xOf(s), yOf(v)); else g.moveTo(this.xOf(s), yOf(v)); pen = true; });
      g.stroke();
    }

    // What a point stands for: a step, or, of many steps, those up to it from the point before.
    span(index) {
      const { x, low } = this.board.data, range = this.board.range;
      if (!Object.keys(low).length) return `step ${x[index]}`;
      const first = index ? x[index - 1] + 1 : range ? Math.max(1, range[0]) : 1;
      return first < x[index] ? `steps ${first}–${x[index]}, mean` : `step ${x[index]}`;
    }

    label(g, lines, evals, colours, yOf, height) {
      const { data, cursor } = this.board, x = data.x;
      let index = x.length - 1;
      if (cursor !== null && x.length) {
        let a = 0, b = x.length - 1;
        while (a < b) { const m = (a + b) >> 1; if (x[m] < cursor) a = m + 1; else b = m; }
        index = a > 0 && cursor - x[a - 1] < x[a] - cursor ? a - 1 : a;
        const px = Math.round(this.xOf(x[index])) + 0.5;
        g.strokeStyle = colours.soft; g.globalAlpha = 0.5; g.lineWidth = 1; g.beginPath(); g.moveTo(px, PAD.top); g.lineTo(px, height - PAD.bottom); g.stroke(); g.globalAlpha = 1;
        lines.forEach((line, n) => { if (line.smooth[index] !== null && line.smooth[index] !== undefined) { g.fillStyle = colours.lines[n]; g.beginPath(); g.arc(px, yOf(line.smooth[index]), 3, 0, 7); g.fill(); } });
      }
      const shown = lines.map((l) => `${lines.length > 1 ? l.label + " " : ""}${short(l.raw[index])}`);
      if (evals.length) { const before = evals.filter((e) => e.step <= x[index]); if (before.length) shown.push(`held-out ${short(before[before.length - 1].eval_reward_mean)}`); }
      const at = this.span(index);
      this.now.textContent = (cursor !== null ? `${at}: ` : "") + shown.join("   ");
      if (cursor === null) this.canvas.setAttribute("aria-label", `${this.spec.title} at ${at}: ${shown.join(", ")}${this.spec.unit ? " " + this.spec.unit : ""}`);
    }
  }

  return { Chart, short };
})();
