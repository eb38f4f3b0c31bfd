// The view "Learning": curves over the steps, marks of what happened, and the newest steps.

import { askStandby } from "../api.js";
import { Chart } from "../charts.js";
import { $, make, put } from "../dom.js";
import { short, whole } from "../format.js";
import { state } from "../state.js";
import { Table } from "../table.js";
import { isFault } from "./events.js";

const line = (name, label) => ({ name, label });
const SPECS = [
  {
    title: "Reward",
    lines: [line("reward_mean", "train")],
    evals: [line("eval_reward_mean", "held-out")],
  },
  // Groups whose rewards are all equal teach nothing.
  {
    title: "Groups of equal rewards",
    lines: [line("zero_variance_share", "share")],
    floor: 0,
    onlyIfMeasured: true,
  },
  // Without train.loss.kl_coef there is no reference, and no curve.
  {
    title: "KL from the reference",
    lines: [line("kl", "KL")],
    unit: "nats",
    onlyIfMeasured: true,
  },
  {
    title: "KL coefficient",
    lines: [line("kl_coef", "coefficient")],
    floor: 0,
    onlyIfMeasured: true,
  },
  // Of a critic.
  {
    title: "Value loss",
    lines: [line("value_loss", "loss")],
    floor: 0,
    onlyIfMeasured: true,
  },
  {
    title: "Value and return",
    lines: [line("value_mean", "value"), line("return_mean", "return")],
    onlyIfMeasured: true,
  },
  {
    title: "Explained variance",
    lines: [line("explained_variance", "of the returns")],
    onlyIfMeasured: true,
  },
  // Of objectives of preferences.
  {
    title: "Pair accuracy",
    lines: [line("pair_accuracy", "train")],
    evals: [line("eval_pair_accuracy", "held-out")],
    floor: 0,
    onlyIfMeasured: true,
  },
  {
    title: "Rewards of pairs",
    lines: [line("chosen_reward", "chosen"), line("rejected_reward", "rejected")],
    onlyIfMeasured: true,
  },
  // Below 0 the policy finds the good answers less likely than the reference does.
  {
    title: "Shift of the chosen log-probs",
    lines: [line("chosen_logprob_shift", "from the reference")],
    unit: "nats",
    onlyIfMeasured: true,
  },
  { title: "KL from the sampling policy", lines: [line("kl_behaviour", "KL")], unit: "nats" },
  { title: "Entropy", lines: [line("entropy", "entropy")], unit: "nats", floor: 0 },
  // Recorded data has a held-out loss, and no reward.
  { title: "Loss", lines: [line("loss", "train")], evals: [line("eval_loss", "held-out")] },
  { title: "Gradient norm", lines: [line("grad_norm", "norm")], floor: 0 },
  {
    title: "Clip fraction",
    lines: [line("clip_fraction", "clipped"), line("dual_clip_fraction", "dual clip")],
    floor: 0,
  },
  {
    title: "Log-prob gap",
    lines: [line("logprob_gap_mean", "mean"), line("logprob_gap_max", "max")],
    floor: 0,
  },
  {
    title: "Log-prob gap at staleness 0",
    lines: [line("logprob_gap_fresh_mean", "mean"), line("logprob_gap_fresh_max", "max")],
    floor: 0,
  },
  {
    title: "Response length",
    lines: [
      line("response_tokens_mean", "trained"),
      line("late_response_tokens_mean", "late"),
      line("masked_response_tokens_mean", "masked"),
      line("dropped_response_tokens_mean", "dropped"),
    ],
    unit: "tokens",
    floor: 0,
  },
  {
    title: "Sequences of a sample",
    lines: [line("sequences_per_sample", "mean")],
    onlyIfMeasured: true,
  },
  { title: "Learning rate", lines: [line("lr", "rate")], floor: 0, onlyIfMeasured: true },
  { title: "Throughput", lines: [line("tokens_per_s", "tokens/s")], unit: "tokens/s", floor: 0 },
  {
    title: "Staleness",
    lines: [line("staleness_mean", "mean"), line("staleness_max", "max")],
    unit: "steps",
    floor: 0,
    onlyIfAny: true,
  },
  {
    title: "Late, masked, dropped",
    lines: [
      line("late_share", "late groups"),
      line("masked_share", "masked tokens"),
      line("dropped_share", "dropped groups"),
    ],
    floor: 0,
    onlyIfAny: true,
  },
  { title: "Effective sample size", lines: [line("ess", "share of tokens")], floor: 0 },
];
const LEADS = ["Reward", "Loss"];
const NAMES = SPECS.flatMap((s) => s.lines.map((l) => l.name)).join(",");
const TABLE_COLUMNS = [
  "reward_mean",
  "loss",
  "kl",
  "kl_behaviour",
  "entropy",
  "grad_norm",
  "clip_fraction",
  "logprob_gap_max",
  "response_tokens_mean",
  "staleness_max",
  "late_share",
  "ess",
  "tokens_per_s",
];
const ZOOM_HINT = "Drag across a curve, or name steps, to look closer.";

// What all charts share: the data, one range of steps, one cursor.
const board = {
  data: { x: [], t: [], series: {}, low: {}, high: {}, evals: [] },
  marks: [],
  cursor: null,
  weight: 0.6,
  range: null,
  pending: false,
  turn: 0,
  redraw() {
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => {
      this.pending = false;
      draw();
    });
  },
  zoom(from, to) {
    this.range = from === null ? null : [from, to];
    this.cursor = null;
    $("zoom-reset").disabled = !this.range;
    $("zoom-from").value = from ?? "";
    $("zoom-to").value = to ?? "";
    put($("zoom-hint"), this.range ? `Steps ${from} to ${to}.` : ZOOM_HINT);
    state.drawnStep = -1;
    learning().catch(() => {});
  },
};

const charts = SPECS.map((spec) => new Chart(spec, board));
$("charts").append(...charts.map((c) => c.element));

let colours = null;
function readColours() {
  const css = getComputedStyle(document.documentElement);
  const get = (name) => css.getPropertyValue(name).trim();
  return {
    soft: get("--soft"),
    hair: get("--hair"),
    sheet: get("--sheet"),
    band: get("--band"),
    fault: get("--fault"),
    scale: get("--third"),
    checkpoint: get("--soft"),
    setting: get("--second"),
    lines: [get("--accent"), get("--second"), get("--third")],
    font: getComputedStyle(document.body).fontFamily,
  };
}

export function draw() {
  if (state.tab !== "learning") return;
  colours ??= readColours();
  for (const chart of charts) chart.draw(colours);
}

// After a change of theme.
export function recolour() {
  colours = null;
  draw();
}

const stepsTable = new Table(
  $("steps-table"),
  [
    { title: "step", num: true, head: true, value: (r) => whole(r.step) },
    { title: "version", num: true, value: (r) => whole(r.version) },
    ...TABLE_COLUMNS.map((name) => ({ title: name, num: true, value: (r) => short(r[name]) })),
  ],
  (r) => String(r.step),
  "The newest steps",
);

export async function learning() {
  if (state.run && state.run.step === state.drawnStep) return;
  const turn = ++board.turn; // an answer that a newer zoom overtook is thrown away
  const [from, to] = board.range ?? [];
  const range = board.range ? `&since=${Math.max(-1, from - 1)}&until=${to}` : "";
  const marked = board.range ? `&since_step=${from}&until_step=${to}` : "";
  const names = [NAMES, ...partNames].join(",");
  const [data, marks, rows] = await Promise.all([
    askStandby(`metrics?names=${encodeURIComponent(names)}&points=360${range}`),
    askStandby(`events?kind=marks&limit=600${marked}`),
    askStandby("steps?limit=20"),
  ]);
  if (turn !== board.turn) return;
  board.data = data;
  chartSets(data.evals);
  chartParts(data.names);
  for (const chart of charts) chart.element.hidden = unmeasured(chart.spec, data);
  // The first curves are large: what the run is ranked by. Recorded data has a loss in the place of a reward.
  const first = charts.find((c) => LEADS.includes(c.spec.title) && !c.element.hidden);
  for (const chart of charts) chart.element.classList.toggle("lead", chart === first);
  board.marks = marks.events.map(markOf).filter((m) => m.kind !== "fault" || m.fault);
  stepsTable.show(rows.steps.reverse());
  state.drawnStep = data.x.length ? data.x[data.x.length - 1] : -1;
  if (board.range) state.drawnStep = state.run ? state.run.step : -1;
  board.redraw();
}

// Of each evaluation set a chart of its reward, and one of how much it solves, as soon as an evaluation has it. A run whose
// only set is held_out has its rewards in the first chart.
const charted = new Set();
function chartSets(evals) {
  const names = [...new Set(evals.flatMap(Object.keys))].filter((n) => SET_METRIC.test(n));
  if (names.every((n) => n.startsWith("eval_held_out/"))) return;
  for (const set of new Set(names.map((n) => n.slice("eval_".length).split("/")[0]))) {
    if (charted.has(set)) continue;
    charted.add(set);
    const metrics = names.map((n) => n.split("/")).filter(([of]) => of === `eval_${set}`);
    const lines = solvedOf(metrics.map(([, metric]) => metric));
    const evals = lines.map((metric) => line(`eval_${set}/${metric}`, metric));
    const reward = [line(`eval_${set}/reward`, "held-out")];
    addChart({ title: `${set}: reward`, lines: [], evals: reward, floor: 0 });
    addChart({ title: `${set}: solved`, lines: [], evals, floor: 0 });
  }
}

// Each reward function has a chart of its mean and its spread, from the first step that has it on.
const PART = /^reward\/(.+)\/std$/;
const partNames = [];
function chartParts(names) {
  const parts = new Set(names.map((name) => PART.exec(name)?.[1]).filter(Boolean));
  for (const part of parts) {
    const lines = [line(`reward/${part}`, "mean"), line(`reward/${part}/std`, "spread")];
    if (partNames.includes(lines[0].name)) continue;
    partNames.push(...lines.map(({ name }) => name));
    addChart({ title: `Reward ${part}`, lines });
    state.drawnStep = -1;
  }
}

// Of the metrics of a set: one sample, the most samples, and their vote.
function solvedOf(metrics) {
  const passes = metrics.filter((m) => m.startsWith("pass@"));
  passes.sort((a, b) => a.split("@")[1] - b.split("@")[1]);
  const ends = passes.length > 1 ? [passes[0], passes.at(-1)] : passes;
  return [...ends, ...metrics.filter((m) => m.startsWith("maj@"))];
}

function addChart(spec) {
  const chart = new Chart(spec, board);
  charts.push(chart);
  $("charts").append(chart.element);
}
const SET_METRIC = /^eval_[^/]+\/(reward|pass@\d+|maj@\d+)$/;

// Before the first step most curves have a place, and none afterwards without a value.
function unmeasured(spec, data) {
  const values = spec.lines.flatMap(({ name }) => data.series[name] ?? []);
  const scores = data.evals.flatMap((e) => (spec.evals ?? []).map(({ name }) => e[name] ?? null));
  // Synchronous training has no staleness: a curve of zeros says nothing.
  const empty = (v) => v === null || (v === 0 && spec.onlyIfAny);
  const none = [...values, ...scores].every(empty);
  return none && (Boolean(spec.onlyIfMeasured) || data.x.length > 0);
}

// The curves as they are drawn: at most 360 means over the range of steps that is shown.
function asCsv({ x, series, evals }) {
  const names = Object.keys(series).filter((name) => series[name].some((v) => v !== null));
  const measured = evals.flatMap((e) => Object.keys(e).filter((n) => e[n] !== null));
  const curves = SPECS.flatMap((spec) => (spec.evals ?? []).map(({ name }) => name));
  const scored = [...new Set(measured)]
    .filter((n) => curves.includes(n) || SET_METRIC.test(n))
    .sort();
  const scores = new Map(evals.map((e) => [e.step, e]));
  const steps = [...new Set([...x, ...scores.keys()])].sort((a, b) => a - b);
  const at = new Map(x.map((step, i) => [step, i]));
  const rows = steps.map((step) => {
    const values = names.map((name) => series[name][at.get(step)] ?? "");
    const held = scores.get(step) ?? {};
    return [step, ...values, ...scored.map((name) => held[name] ?? "")].join(",");
  });
  return [["step", ...names, ...scored].join(","), ...rows, ""].join("\n");
}

function download() {
  const link = make("a");
  link.href = URL.createObjectURL(new Blob([asCsv(board.data)], { type: "text/csv" }));
  link.download = `${state.run?.run_name ?? "run"}-curves.csv`;
  link.click();
  URL.revokeObjectURL(link.href);
}

function markOf(event) {
  let kind = "fault";
  if (event.type === "CheckpointRecorded") kind = "checkpoint";
  else if (["Scaled", "Drained"].includes(event.type)) kind = "scale";
  else if (["SettingsChanged", "RunExtended"].includes(event.type)) kind = "setting";
  const step = event.step || event.fields.step || 0;
  return { step, kind, fault: isFault(event) };
}

function zoomToTyped() {
  const [from, to] = [$("zoom-from").value, $("zoom-to").value];
  const a = Number(from || 0);
  const b = Number(to || state.run?.step || 0);
  if (!from && !to) board.zoom(null, null);
  else if (Number.isInteger(a) && Number.isInteger(b) && 0 <= a && a < b) board.zoom(a, b);
  else put($("zoom-hint"), "Name a step and a later one.");
}

$("smooth").addEventListener("input", (e) => {
  board.weight = Number(e.target.value);
  board.redraw();
});
$("zoom-reset").addEventListener("click", () => board.zoom(null, null));
$("curves-csv").addEventListener("click", download);
for (const id of ["zoom-from", "zoom-to"]) $(id).addEventListener("change", zoomToTyped);
new ResizeObserver(() => board.redraw()).observe($("charts"));
