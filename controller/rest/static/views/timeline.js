// The view "Timeline": swim lanes of the last minutes, one of each process and seat.

import { askStandby } from "../api.js";
import { $, put } from "../dom.js";
import { number, plural, seconds } from "../format.js";
import { state } from "../state.js";
import { Table } from "../table.js";

// By the letter of a cell: words, colour, and the share of the row's height that it takes.
const LOOKS = {
  c: ["computes", "accent", 1],
  g: ["generates", "third", 1],
  r: ["sums gradients", "second", 1],
  m: ["commits", "soft", 1],
  o: ["in the open step", "band", 1],
  w: ["waits", "second", 0.28],
  s: ["starts", "warn", 0.6],
  d: ["is down", "fault", 1],
  l: ["leads", "good", 0.6],
  ".": ["runs", "rule", 0.12],
};
const TOP = 26;
const MANY = 60; // from so many lanes on, every second refresh is enough
const NEAR_PX = 5;

const canvas = $("lanes");
let shown = null; // newest answer, with the place of its drawing
let turn = 0;

const table = new Table(
  $("lanes-table"),
  [
    { title: "process", head: true, value: (l) => l.name },
    { title: "role", value: (l) => l.role },
    { title: "busy", num: true, value: (l) => share(l.busy) },
    { title: "waits for", value: waitsOf },
  ],
  (l) => l.name,
  "Share of the time that each process is busy, and whom it waits for",
);

// Metrics of the newest step, with what they are shares of.
const USES = [
  ["trainer_busy", "trainers compute"],
  ["engine_busy", "engines generate"],
  ["device_busy", "GPUs are busy"],
  ["mfu", "MFU of the trainers"],
];
const RATES = [
  ["tokens_per_s_device", "trained"],
  ["engine_tokens_per_s_device", "generated"],
];

function useText(metrics) {
  const known = (names) => names.filter(([name]) => metrics[name] !== undefined);
  const shares = known(USES).map(([name, words]) => `${words} ${share(metrics[name])}`);
  const rates = known(RATES).map(([name, words]) => `${number(metrics[name])} ${words}`);
  const devices = rates.length ? [`tokens a second and device: ${rates.join(", ")}`] : [];
  return [...shares, ...devices].join("; ");
}

const share = (part) => (part === null ? "–" : `${Math.round(part * 100)}%`);
const clock = (t) => new Date(t * 1000).toLocaleTimeString("en-GB");

function waitsOf(lane) {
  const waits = Object.entries(lane.waits);
  return waits.map(([owner, s]) => `${owner} ${seconds(s)}`).join(", ") || "–";
}

export async function timeline() {
  turn += 1;
  if (shown && shown.lanes.length > MANY && turn % 2) return;
  const place = placeOf(0);
  const cells = Math.max(10, Math.min(600, Math.floor((place.x1 - place.x0) / 2)));
  const found = await askStandby(`timeline?seconds=${$("lanes-span").value}&cells=${cells}`);
  shown = { ...found, place: placeOf(found.lanes.length) };
  drawLanes();
  put($("lanes-use"), useText(state.run.metrics));
  table.show(found.lanes);
  const down = found.lanes.filter((l) => l.cells.endsWith("d")).map((l) => l.name);
  const text = `${plural(found.lanes.length, "lane")} from ${clock(found.since)} to ${clock(found.until)}, ${plural(found.marks.length, "fault")}`;
  const label = down.length ? `${text}; down: ${down.join(", ")}` : text;
  canvas.setAttribute("aria-label", `${label}. The table below has the shares.`);
  $("lanes-none").hidden = found.lanes.length > 0;
}

function placeOf(lanes) {
  const width = canvas.clientWidth;
  const row = lanes <= 24 ? 24 : lanes <= MANY ? 17 : 13;
  const narrow = width < 620;
  return {
    width,
    row,
    font: row > 13 ? 12 : 10,
    x0: narrow ? 84 : 128,
    x1: width - (narrow ? 36 : 236),
    narrow,
    height: TOP + Math.max(1, lanes) * row + 8,
  };
}

function cleared({ width, height }) {
  const ratio = window.devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const g = canvas.getContext("2d");
  g.setTransform(ratio, 0, 0, ratio, 0, 0);
  g.textBaseline = "middle";
  return g;
}

function drawLanes() {
  const { lanes, marks, commits, place } = shown;
  const g = cleared(place);
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(`--${name}`);
  const family = getComputedStyle(document.body).fontFamily;
  drawAxis(g, colour, family, commits);
  g.font = `${place.font}px ${family}`;
  lanes.forEach((lane, n) => {
    const y = TOP + n * place.row;
    drawLane(g, lane, y, colour);
    g.fillStyle = colour("ink");
    g.textAlign = "left";
    const middle = y + place.row / 2;
    g.fillText(fitted(g, lane.name, place.x0 - 8), 0, middle);
    g.fillStyle = colour("soft");
    if (lane.busy !== null) g.fillText(share(lane.busy), place.x1 + 6, middle);
    const waits = waitsOf(lane);
    if (!place.narrow && waits !== "–")
      g.fillText(fitted(g, waits, place.width - place.x1 - 46), place.x1 + 46, middle);
  });
  const fault = colour("fault");
  for (const mark of marks) drawMark(g, mark, fault);
}

function drawLane(g, { cells }, y, colour) {
  const { x0, x1, row } = shown.place;
  const width = (x1 - x0) / cells.length;
  const bar = row - (row > 13 ? 5 : 3);
  for (let from = 0; from < cells.length; ) {
    let to = from + 1;
    while (to < cells.length && cells[to] === cells[from]) to += 1;
    const look = LOOKS[cells[from]];
    if (look) {
      const height = Math.max(1, look[2] * bar);
      g.fillStyle = colour(look[1]);
      g.fillRect(x0 + from * width, y + bar - height, (to - from) * width, height);
    }
    from = to;
  }
}

function drawAxis(g, colour, family, commits) {
  const { x0, x1, height } = shown.place;
  const span = shown.until - shown.since;
  const every = [5, 10, 30, 60, 120, 300, 600].find((s) => (s / span) * (x1 - x0) > 66) ?? 1200;
  g.font = `11px ${family}`;
  g.textAlign = "center";
  for (let t = Math.ceil(shown.since / every) * every; t <= shown.until; t += every) {
    const x = Math.round(xOf(t)) + 0.5;
    g.fillStyle = colour("hair");
    g.fillRect(x, TOP - 6, 1, height - TOP);
    g.fillStyle = colour("soft");
    g.fillText(clock(t), Math.min(Math.max(x, x0 + 24), x1 - 24), 8);
  }
  g.fillStyle = colour("accent");
  for (const t of commits) g.fillRect(xOf(t), TOP - 8, 1, 4);
}

function drawMark(g, mark, fault) {
  const { row, height } = shown.place;
  const n = shown.lanes.findIndex((lane) => lane.name === mark.lane);
  const y = TOP + n * row;
  const x = xOf(mark.t);
  g.fillStyle = fault;
  g.globalAlpha = 0.35;
  g.fillRect(x, TOP - 4, 1, height - TOP);
  g.globalAlpha = 1;
  g.beginPath();
  g.moveTo(x - 5, y - 3);
  g.lineTo(x + 5, y - 3);
  g.lineTo(x, y + 5);
  g.fill();
}

function xOf(t) {
  const { x0, x1 } = shown.place;
  return x0 + ((t - shown.since) / (shown.until - shown.since)) * (x1 - x0);
}

// The beginning of a text that has room.
function fitted(g, text, width) {
  let cut = text;
  while (cut.length > 1 && g.measureText(cut).width > width) cut = cut.slice(0, -1);
  return cut === text ? text : `${cut.slice(0, -1)}…`;
}

// What is under the pointer.
function tell(event) {
  if (!shown) return;
  const { x0, x1, row } = shown.place;
  const [x, y] = [event.offsetX, event.offsetY];
  const near = shown.marks.filter((mark) => Math.abs(xOf(mark.t) - x) < NEAR_PX);
  const lane = shown.lanes[Math.floor((y - TOP) / row)];
  const t = shown.since + ((x - x0) / (x1 - x0)) * (shown.until - shown.since);
  const look = lane && LOOKS[lane.cells[Math.floor(((x - x0) / (x1 - x0)) * lane.cells.length)]];
  const parts = near.map((mark) => `${clock(mark.t)} ${mark.text}`);
  if (look) parts.unshift(`${lane.name} ${look[0]} at ${clock(t)}`);
  if (lane) parts.push(`waits for ${waitsOf(lane)}`);
  put($("lanes-at"), parts.join(" · "));
}

canvas.addEventListener("pointermove", tell);
canvas.addEventListener("pointerdown", tell);
