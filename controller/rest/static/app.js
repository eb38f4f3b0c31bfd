// The dashboard. Asks one controller, goes on with another when it stops answering, and shows what
// it is told as text, never as markup.
"use strict";

const $ = (id) => document.getElementById(id);
const { Chart, short } = Charts;
const TIMEOUT_MS = 4000;
const state = { run: null, bases: [location.origin], base: 0, tab: "learning", failed: 0, lastEvent: null, group: null, lastStep: -1, readsNeedToken: false, askAgain: 0 };

// ---- elements -----------------------------------------------------------------------------------

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}
function put(element, text) { if (element.textContent !== text) element.textContent = text; }
function svg(tag, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

// columns: [{ title, num, head, value(row) -> text, class(row), node(row) }]. Rows keep their elements.
// Of many rows only those in sight are in the document: the rest is room above and below.
const MANY = 150, ROW_PX = 31;
class Table {
  constructor(table, columns, key, caption) {
    this.table = table; this.columns = columns; this.key = key; this.rows = new Map(); this.data = []; this.onRow = null;
    table.append(make("caption", "unseen", caption));
    const head = make("tr");
    for (const c of columns) { const th = make("th", c.num ? "num" : "", c.title); th.scope = "col"; head.append(th); }
    const thead = make("thead"); thead.append(head);
    this.body = make("tbody");
    this.above = make("tbody"); this.below = make("tbody");
    for (const room of [this.above, this.below]) { room.setAttribute("aria-hidden", "true"); const tr = make("tr"), td = make("td"); td.colSpan = columns.length; tr.append(td); room.append(tr); room.hidden = true; }
    table.append(thead, this.above, this.body, this.below);
    this.box = table.parentElement;
    this.box.addEventListener("scroll", () => { if (this.data.length > MANY) requestAnimationFrame(() => this.render()); }, { passive: true });
  }
  show(rows, onRow) { this.data = rows; this.onRow = onRow; this.render(); }
  render() {
    let first = 0, last = this.data.length;
    const many = last > MANY;
    this.table.classList.toggle("many", many);
    if (many) {
      first = Math.min(Math.max(0, Math.floor(this.box.scrollTop / ROW_PX) - 15), last - 1);
      last = Math.min(last, first + Math.ceil(this.box.clientHeight / ROW_PX) + 30);
      this.table.setAttribute("aria-rowcount", String(this.data.length + 1));
    } else { this.table.removeAttribute("aria-rowcount"); }
    for (const [room, count] of [[this.above, first], [this.below, this.data.length - last]]) { room.hidden = !count; room.firstChild.firstChild.style.height = `${count * ROW_PX}px`; }
    const seen = new Set();
    let previous = null;
    for (let at = first; at < last; at++) {
      const row = this.data[at], key = this.key(row);
      seen.add(key);
      let tr = this.rows.get(key);
      if (!tr) {
        tr = make("tr");
        for (const c of this.columns) { const cell = make(c.head ? "th" : "td", c.num ? "num" : ""); if (c.head) cell.scope = "row"; tr.append(cell); if (c.node) cell.append(c.node(row)); }
        this.rows.set(key, tr);
      }
      if (many) tr.setAttribute("aria-rowindex", String(at + 2)); else tr.removeAttribute("aria-rowindex");
      this.columns.forEach((c, i) => { if (c.value) put(tr.cells[i], c.value(row)); if (c.class) { const k = c.class(row); if (tr.cells[i].className !== k) tr.cells[i].className = k; } });
      if (this.onRow) this.onRow(tr, row);
      const wanted = previous ? previous.nextSibling : this.body.firstChild;
      if (wanted !== tr) this.body.insertBefore(tr, wanted);
      previous = tr;
    }
    for (const [key, tr] of this.rows) if (!seen.has(key)) { tr.remove(); this.rows.delete(key); }
  }
}

const number = (v, digits = 3) => (v === null || v === undefined ? "–" : Number(v).toLocaleString("en", { maximumSignificantDigits: digits }));
const whole = (v) => Math.round(v).toLocaleString("en");
const seconds = (s) => (s === null || s === undefined || s < 0 ? "–" : s < 10 ? `${s.toFixed(1)} s` : s < 120 ? `${Math.round(s)} s` : s < 7200 ? `${Math.round(s / 60)} min` : `${(s / 3600).toFixed(1)} h`);
const bytes = (b) => (b === undefined ? "–" : b >= 2 ** 30 ? `${(b / 2 ** 30).toFixed(1)} GiB` : `${Math.round(b / 2 ** 20)} MiB`);

// ---- asking -------------------------------------------------------------------------------------

class Refusal extends Error { constructor(status, detail) { super(detail); this.status = status; } }
const storedToken = () => sessionStorage.getItem("paceline-token") || "";
state.readsNeedToken = Boolean(storedToken());

async function request(base, path, options = {}) {
  const headers = { Accept: "application/json" };
  const token = options.token ?? (options.method ? storedToken() : state.readsNeedToken ? storedToken() : "");
  if (token) headers.Authorization = `Bearer ${token}`;
  if (options.body) headers["Content-Type"] = "application/json";
  const stop = new AbortController();
  const timer = setTimeout(() => stop.abort(), options.method ? 12000 : TIMEOUT_MS);
  let response, body;
  try {
    response = await fetch(base + "/api/v1/" + path, { method: options.method || "GET", headers, body: options.body, signal: stop.signal, credentials: "omit", redirect: options.method ? "manual" : "follow", cache: "no-store" });
    if (response.type === "opaqueredirect") throw new Refusal(307, "another controller leads by now: try again");
    body = await response.json();
  } finally { clearTimeout(timer); }
  if (!response.ok) throw new Refusal(response.status, body.detail || `the controller answered ${response.status}`);
  return body;
}

// Reads go to the controller that answered last; where it is silent, to the next one.
async function ask(path) {
  let error = null;
  for (let n = 0; n < state.bases.length; n++) {
    const base = state.bases[state.base % state.bases.length];
    const token = state.readsNeedToken ? storedToken() : "";
    try { return await request(base, path, { token }); } catch (e) {
      if (e instanceof Refusal && e.status === 401) {
        // Only a token that was sent and refused is forgotten; then it is tried without.
        if (token && token === storedToken()) sessionStorage.removeItem("paceline-token");
        state.readsNeedToken = !token && Boolean(storedToken());
        if (token || state.readsNeedToken) { n -= 1; continue; }
        await askToken();
      }
      if (e instanceof Refusal && e.status !== 503) throw e;
      error = e;
      state.base = (state.base + 1) % state.bases.length;
    }
  }
  throw error;
}

// What only the leader knows (heartbeats, gauges) is asked there; where it is not in reach, here.
async function askLeader(path) {
  const base = leaderBase();
  if (base && base !== state.bases[state.base] && reached.get(base)) {
    try { return await request(base, path); } catch { /* it may have died just now */ }
  }
  return ask(path);
}

const ASK_AGAIN_MS = 60000; // after Cancel
let asking = null;
async function askToken() {
  if (!asking && (Date.now() < state.askAgain || $("dialog").open)) return false;
  asking ??= confirmed({ title: "This controller asks for the run's token", text: "It is reachable from other machines, so reading needs the token too.", yes: "Go on", unanswered: "No controller answers: try again.", act: async (token) => { await request(state.bases[state.base], "run", { token }); } }).then((done) => { state.readsNeedToken = done; if (!done) state.askAgain = Date.now() + ASK_AGAIN_MS; return done; }).finally(() => { asking = null; });
  return asking;
}

function leaderBase() {
  const leader = state.run && state.run.controllers.find((c) => c.controller_id === state.run.leader && c.rest);
  return leader ? aliased(leader.rest) : null;
}

async function steer(path, body, token) {
  return request(leaderBase() ?? state.bases[state.base], path, { method: "POST", body: JSON.stringify(body), token });
}

// A page opened as localhost stays so: another loopback name is another site to the browser.
const LOOPBACK = ["localhost", "127.0.0.1", "[::1]"];
function aliased(url) {
  const at = new URL(url);
  const same = at.port === location.port && at.protocol === location.protocol;
  return same && LOOPBACK.includes(at.hostname) && LOOPBACK.includes(location.hostname) ? location.origin : url;
}

// ---- the dialog ---------------------------------------------------------------------------------

// option: words beside a checkbox; act is told whether it was set. unanswered: where nobody answers act;
// a command may have been carried out all the same, and has one id for all tries from one dialog.
const UNANSWERED = "No controller answered: whether it was done is not known. Try again: it counts once.";
function confirmed({ title, text, yes, danger, option, act, unanswered = UNANSWERED }) {
  const dialog = $("dialog"), form = $("dialog-form"), before = document.activeElement;
  put($("dialog-title"), title); put($("dialog-text"), text); put($("dialog-error"), ""); put($("dialog-yes"), yes);
  $("dialog-yes").className = danger ? "danger" : "";
  const needs = !storedToken();
  $("token-label").hidden = $("token-hint").hidden = !needs;
  $("token").value = "";
  $("option-label").hidden = !option; $("option").checked = false; put($("option-text"), option || "");
  dialog.showModal();
  (needs ? $("token") : $("dialog-no")).focus();
  return new Promise((resolve) => {
    const close = (done) => { form.onsubmit = null; dialog.onclose = null; $("dialog-no").onclick = null; if (dialog.open) dialog.close(); if (before) before.focus(); resolve(done); };
    $("dialog-no").onclick = () => close(false);
    dialog.onclose = () => close(false);
    form.onsubmit = async (e) => {
      e.preventDefault();
      const token = storedToken() || $("token").value.trim();
      if (!token) { put($("dialog-error"), "Type the run's token first."); return; }
      $("dialog-yes").disabled = true;
      try {
        const done = await act(token, $("option").checked);
        sessionStorage.setItem("paceline-token", token);
        close(true);
        if (done && done.message) say(done.message);
      } catch (error) {
        if (error.status === 401) { sessionStorage.removeItem("paceline-token"); $("token-label").hidden = $("token-hint").hidden = false; $("token").focus(); }
        put($("dialog-error"), error instanceof Refusal ? error.message : unanswered);
      } finally { $("dialog-yes").disabled = false; }
    };
  });
}

const requestId = () => "page-" + [...crypto.getRandomValues(new Uint8Array(12))].map((b) => b.toString(16).padStart(2, "0")).join("");
function command(path, title, text, yes, extra = {}, danger = false) {
  const request_id = requestId(); // the same for every try from one dialog
  return confirmed({ title, text, yes, danger, act: (token) => steer(path, { ...extra, request_id }, token) });
}
function drain(w) {
  const request_id = requestId();
  return confirmed({ title: `Drain ${w.worker_id}?`, text: "It finishes what it holds and leaves. The desired count drops by one.", option: "Start another in its place", yes: "Drain", act: (token, replace) => steer(`workers/${encodeURIComponent(w.worker_id)}/drain`, { replace, request_id, incarnation: w.incarnation }, token) });
}

let quietTimer = 0;
function say(text, bad = false) {
  const alert = $("alert");
  alert.hidden = false; alert.className = bad ? "alert" : "alert good pill"; put(alert, text);
  clearTimeout(quietTimer);
  quietTimer = setTimeout(() => { alert.hidden = true; }, bad ? 15000 : 6000);
}

// ---- header -------------------------------------------------------------------------------------

const PHASES = { running: "good", finished: "good", paused: "warn", waiting: "warn", stopping: "warn", failed: "bad" };
function showRun(run) {
  state.run = run;
  const others = run.controllers.filter((c) => c.rest && c.state !== "silent").map((c) => aliased(c.rest));
  const current = state.bases[state.base];
  state.bases = [...new Set([current, ...others, ...state.bases])].slice(0, 16);
  state.base = 0;
  document.title = `${run.run_name} · step ${run.step} · Paceline`;
  put($("run-name"), run.run_name);
  put($("phase"), run.phase); $("phase").className = "pill " + (PHASES[run.phase] || "bad");
  put($("v-step"), `${whole(run.step)} / ${whole(run.total_steps)}`);
  $("v-progress").max = run.total_steps || 1; $("v-progress").value = run.step;
  const m = run.metrics;
  put($("v-reward"), "reward_mean" in m ? m.reward_mean.toFixed(3) : "–");
  put($("v-tokens"), "tokens_per_s" in m && !run.stalled_s ? number(m.tokens_per_s) : "–");
  put($("v-stale"), "staleness_max" in m ? `${number(m.staleness_max)} of ${run.max_staleness}` : "–");
  put($("v-left"), run.stalled_s ? "–" : seconds(run.time_left_s));
  put($("v-leader"), run.leader + (run.failovers ? ` (change ${run.failovers})` : ""));
  const over = run.phase === "finished" || run.phase === "failed";
  put($("do-pause"), run.phase === "paused" ? "Resume" : "Pause");
  for (const id of ["do-pause", "do-checkpoint", "do-stop"]) $(id).disabled = over;
  for (const base of others) reach(base);
  const spare = others.filter((base) => base !== state.bases[0] && reached.get(base)).length;
  put($("link"), `answered by ${run.served_by}` + (spare ? `, ${spare} other${spare > 1 ? "s" : ""} in reach` : "")); $("link").className = "";
}

// Whether this page may talk to another controller is tried while its own is alive: the page's policy
// names those known when it was loaded, so one that came later makes it load anew.
const reached = new Map();
async function reach(base) {
  if (reached.has(base)) return;
  reached.set(base, base === location.origin);
  try { await fetch(base + "/healthz", { credentials: "omit", cache: "no-store" }); reached.set(base, true); } catch { setTimeout(() => reached.delete(base), 10000); }
}
document.addEventListener("securitypolicyviolation", (e) => {
  const last = Number(sessionStorage.getItem("paceline-reloaded") || 0);
  if (e.effectiveDirective !== "connect-src" || $("dialog").open || state.failed || Date.now() - last < 10000) return;
  sessionStorage.setItem("paceline-reloaded", String(Date.now()));
  location.reload();
});

// ---- learning -----------------------------------------------------------------------------------

const SPECS = [
  { title: "Reward", lead: true, lines: [{ name: "reward_mean", label: "train" }], evals: true },
  { title: "KL from the reference", lines: [{ name: "kl", label: "KL" }], unit: "nats" },
  { title: "KL from the sampling policy", lines: [{ name: "kl_behaviour", label: "KL" }], unit: "nats" },
  { title: "Entropy", lines: [{ name: "entropy", label: "entropy" }], unit: "nats", floor: 0 },
  { title: "Loss", lines: [{ name: "loss", label: "loss" }] },
  { title: "Gradient norm", lines: [{ name: "grad_norm", label: "norm" }], floor: 0 },
  { title: "Clip fraction", lines: [{ name: "clip_fraction", label: "clipped" }], floor: 0 },
  { title: "Log-prob gap", lines: [{ name: "logprob_gap_mean", label: "mean" }, { name: "logprob_gap_max", label: "max" }], floor: 0 },
  { title: "Log-prob gap at staleness 0", lines: [{ name: "logprob_gap_fresh_mean", label: "mean" }, { name: "logprob_gap_fresh_max", label: "max" }], floor: 0 },
  { title: "Response length", lines: [{ name: "response_tokens_mean", label: "tokens" }], unit: "tokens", floor: 0 },
  { title: "Throughput", lines: [{ name: "tokens_per_s", label: "tokens/s" }], unit: "tokens/s", floor: 0 },
  { title: "Staleness", lines: [{ name: "staleness_mean", label: "mean" }, { name: "staleness_max", label: "max" }], unit: "steps", floor: 0 },
];
const ZOOM_HINT = "Drag across a curve, or name steps, to look closer.";
const board = {
  data: { x: [], t: [], series: {}, low: {}, high: {}, evals: [] }, marks: [], cursor: null, weight: 0.6, range: null, pending: false, turn: 0,
  redraw() { if (!this.pending) { this.pending = true; requestAnimationFrame(() => { this.pending = false; draw(); }); } },
  zoom(a, b) { this.range = a === null ? null : [a, b]; this.cursor = null; $("zoom-reset").disabled = !this.range; $("zoom-from").value = a ?? ""; $("zoom-to").value = b ?? ""; put($("zoom-hint"), this.range ? `Steps ${a} to ${b}.` : ZOOM_HINT); state.lastStep = -1; learning().catch(() => {}); },
};
const charts = SPECS.map((spec) => new Chart(spec, board));
$("charts").append(...charts.map((c) => c.element));
let colours = null;
function readColours() {
  const css = getComputedStyle(document.documentElement), get = (n) => css.getPropertyValue(n).trim();
  colours = { soft: get("--soft"), hair: get("--hair"), sheet: get("--sheet"), band: get("--band"), fault: get("--fault"), scale: get("--third"), checkpoint: get("--soft"), lines: [get("--accent"), get("--second"), get("--third")], font: getComputedStyle(document.body).fontFamily };
}
function draw() { if (state.tab === "learning") { if (!colours) readColours(); for (const chart of charts) chart.draw(colours); } }
const stepsTable = new Table($("steps-table"), [
  { title: "step", num: true, head: true, value: (r) => whole(r.step) }, { title: "version", num: true, value: (r) => whole(r.version) },
  ...["reward_mean", "loss", "kl", "kl_behaviour", "entropy", "grad_norm", "clip_fraction", "logprob_gap_max", "response_tokens_mean", "staleness_max", "tokens_per_s"].map((name) => ({ title: name, num: true, value: (r) => short(r[name]) })),
], (r) => String(r.step), "The newest steps");

async function learning() {
  if (state.run && state.run.step === state.lastStep) return;
  const turn = ++board.turn; // what was asked for before the newest zoom is no longer wanted
  const names = SPECS.flatMap((s) => s.lines.map((l) => l.name)).join(",");
  const range = board.range ? `&since=${Math.max(-1, board.range[0] - 1)}&until=${board.range[1]}` : "";
  const marked = board.range ? `&since_step=${board.range[0]}&until_step=${board.range[1]}` : "";
  const [data, marks, rows] = await Promise.all([ask(`metrics?names=${names}&points=360${range}`), ask(`events?kind=marks&limit=600${marked}`), ask("steps?limit=20")]);
  if (turn !== board.turn) return;
  board.data = data;
  board.marks = marks.events.map((e) => ({ step: e.step || e.fields.step || 0, kind: e.type === "CheckpointRecorded" ? "checkpoint" : ["Scaled", "Drained"].includes(e.type) ? "scale" : "fault", fault: e.severity === "fault" })).filter((m) => m.kind !== "fault" || m.fault);
  stepsTable.show(rows.steps.reverse());
  state.lastStep = data.x.length ? data.x[data.x.length - 1] : -1;
  if (board.range) state.lastStep = state.run ? state.run.step : -1;
  board.redraw();
}

// ---- flow ---------------------------------------------------------------------------------------

const STATIONS = [["pending", "waiting again"], ["leased", "being generated"], ["ready", "ready"], ["in_step", "in the step"], ["trained", "trained"]];
const picture = {};
function drawPipeline() {
  const root = svg("svg", { viewBox: "0 0 1000 190", "aria-hidden": "true" });
  root.append(svg("rect", { class: "role", x: 206, y: 14, width: 170, height: 162, rx: 10 }), svg("rect", { class: "role", x: 606, y: 14, width: 170, height: 162, rx: 10 }));
  picture.rollout = svg("text", { x: 291, y: 36, class: "soft mid" }); picture.policy = svg("text", { x: 691, y: 36, class: "soft mid" });
  picture.wait = svg("text", { x: 691, y: 164, class: "soft mid" }); picture.made = svg("text", { x: 291, y: 164, class: "soft mid" });
  STATIONS.forEach(([name, label], n) => {
    const x = 20 + n * 200;
    const box = svg("rect", { class: "box", x, y: 52, width: 142, height: 86, rx: 8 });
    picture[name] = svg("text", { x: x + 71, y: 98, class: "big mid" });
    root.append(box, picture[name], svg("text", { x: x + 71, y: 122, class: "soft mid" }, label));
    picture[name + "-box"] = box;
    if (n < 4) { const d = `M ${x + 146} 95 H ${x + 196}`; picture["pulse" + n] = svg("path", { d, class: "pulse" }); root.append(svg("path", { d, class: "pipe" }), picture["pulse" + n]); }
  });
  picture.rate = svg("text", { x: 891, y: 164, class: "soft mid" });
  root.append(picture.rollout, picture.policy, picture.wait, picture.made, picture.rate);
  $("pipeline").append(root);
}
drawPipeline();

async function flow() {
  const f = await askLeader("flow");
  put($("bottleneck"), f.bottleneck);
  for (const [name] of STATIONS) { put(picture[name], whole(f.tasks[name])); picture[name + "-box"].setAttribute("class", f.tasks[name] && name !== "trained" ? "box busy" : "box"); }
  const moving = state.run && state.run.phase === "running";
  const active = [f.tasks.leased, f.tasks.leased, f.tasks.ready, f.tasks.in_step];
  active.forEach((v, n) => picture["pulse" + n].setAttribute("class", moving && (v || n === 3) ? "pulse" : "pulse still"));
  put(picture.rollout, `${f.workers.rollout} rollout worker${f.workers.rollout === 1 ? "" : "s"}`);
  put(picture.policy, `${f.workers.policy} policy replica${f.workers.policy === 1 ? "" : "s"}`);
  put(picture.made, f.time_split_s.generate !== undefined ? `${seconds(f.time_split_s.generate)} a group` : "");
  put(picture.wait, f.time_split_s.wait !== undefined && f.step_s ? `${Math.round(Math.min(1, f.time_split_s.wait / f.step_s) * 100)}% of a step waiting` : "");
  put(picture.rate, `${f.stalled_s ? "–" : number(f.tokens_per_s)} tokens/s`);
  const dropped = Object.entries(f.tasks.dropped).map(([k, v]) => `${v} ${k}`).join(", ");
  put($("pipeline-text"), STATIONS.map(([n, l]) => `${f.tasks[n]} ${l}`).join(", ") + (dropped ? `; dropped: ${dropped}` : ""));
  histogram(f); split(f);
}

function histogram(f) {
  const top = Math.max(f.max_staleness + 1, ...Object.keys(f.staleness).map(Number));
  const most = Math.max(1, ...Object.values(f.staleness));
  const root = svg("svg", { viewBox: "0 0 460 190", "aria-hidden": "true" });
  const w = Math.min(70, 420 / (top + 1));
  for (let age = 0; age <= top; age++) {
    const count = f.staleness[age] || 0, h = (count / most) * 120, x = 20 + age * w;
    root.append(svg("rect", { class: age > f.max_staleness ? "bar over" : "bar", x: x + 4, y: 150 - h, width: w - 8, height: h, rx: 2 }), svg("text", { x: x + w / 2, y: 168, class: "soft mid" }, String(age)));
    if (count) root.append(svg("text", { x: x + w / 2, y: 144 - h, class: "mid" }, String(count)));
  }
  const bx = 20 + (f.max_staleness + 1) * w;
  root.append(svg("line", { class: "axis", x1: 20, x2: 440, y1: 150.5, y2: 150.5 }), svg("line", { class: "bound", x1: bx, x2: bx, y1: 14, y2: 150 }), svg("text", { x: bx + 6, y: 24, class: "soft" }, `bound: ${f.max_staleness}`));
  $("staleness").replaceChildren(root);
  const told = Object.entries(f.staleness).map(([age, n]) => `${n} at ${age}`).join(", ");
  put($("staleness-text"), told ? `Groups by age of their oldest token, in steps: ${told}. The bound is ${f.max_staleness}.` : `Nothing is in flight. The bound is ${f.max_staleness}.`);
}

const PARTS = [["wait", "waiting for groups", "second"], ["compute", "computing", "bar"], ["reduce", "summing gradients", "third"], ["commit", "committing", "quietbar"], ["publish", "publishing weights", "quietbar"], ["generate", "generating (a group)", "bar"], ["reward", "scoring (a group)", "quietbar"]];
function split(f) {
  const root = svg("svg", { viewBox: "0 0 460 190", "aria-hidden": "true" });
  const parts = PARTS.filter(([name]) => f.time_split_s[name] !== undefined);
  const most = Math.max(1e-9, f.step_s, ...parts.map(([n]) => f.time_split_s[n]));
  parts.forEach(([name, label, look], n) => {
    const y = 18 + n * 24, v = f.time_split_s[name];
    root.append(svg("text", { x: 150, y: y + 11, class: "soft end" }, label), svg("rect", { class: look, x: 160, y, width: Math.max(1, (v / most) * 230), height: 14, rx: 2 }), svg("text", { x: 168 + (v / most) * 230, y: y + 11 }, v < 0.1 ? `${Math.round(v * 1000)} ms` : seconds(v)));
  });
  $("split").replaceChildren(root);
}

// ---- fleet --------------------------------------------------------------------------------------

const STATE = { running: "good", leader: "good", standby: "", spare: "", starting: "warn", draining: "warn", suspect: "warn", silent: "bad", dead: "bad", stopped: "" };
const stateClass = (row) => "state " + (STATE[row.state] || "");
const controllersTable = new Table($("controllers-table"), [
  { title: "controller", head: true, value: (c) => c.controller_id }, { title: "state", value: (c) => c.state, class: stateClass },
  { title: "host", value: (c) => c.host }, { title: "pid", num: true, value: (c) => String(c.pid) }, { title: "heard", num: true, value: (c) => seconds(c.heartbeat_age_s) },
  { title: "term", num: true, value: (c) => (c.state === "leader" && state.run ? String(state.run.term) : "") }, { title: "dashboard", value: (c) => c.rest },
], (c) => c.controller_id, "Controllers");
const gpu = (g) => (g.gpu_memory_bytes === undefined ? "–" : bytes(g.gpu_memory_bytes) + (g.gpu_utilization === undefined ? "" : `, ${Math.round(g.gpu_utilization * 100)}% busy`));
const workersTable = new Table($("workers-table"), [
  { title: "worker", head: true, value: (w) => w.worker_id }, { title: "role", value: (w) => w.role }, { title: "state", value: (w) => w.state, class: stateClass },
  { title: "doing", value: (w) => w.activity + (w.held_leases ? ` (${w.held_leases} tasks)` : "") }, { title: "heard", num: true, value: (w) => seconds(w.heartbeat_age_s), class: (w) => (w.heartbeat_age_s > 2 ? "num warn" : "num") },
  { title: "mesh", num: true, value: (w) => (w.mesh_epoch ? String(w.mesh_epoch) : "–") }, { title: "version", num: true, value: (w) => (w.version < 0 ? "–" : String(w.version)) },
  { title: "memory", num: true, value: (w) => bytes(w.gauges.memory_bytes ?? w.gauges.rss_bytes) }, { title: "GPU", num: true, value: (w) => gpu(w.gauges) }, { title: "tokens/s", num: true, value: (w) => (w.gauges.tokens_per_s === undefined ? "–" : number(w.gauges.tokens_per_s)) },
  { title: "host", value: (w) => w.host }, { title: "pid", num: true, value: (w) => String(w.pid) },
  { title: "steer", node: (w) => { const b = make("button", "small", "Drain"); b.type = "button"; b.setAttribute("aria-label", `Drain ${w.worker_id}`); b.addEventListener("click", () => drain(workersTable.data.find((now) => now.worker_id === w.worker_id) || w)); return b; } },
], (w) => w.worker_id, "Workers");
// What someone typed, by role: only that is sent, so that an open page undoes nobody else's change.
const scaleTyped = new Set();
async function fleet() {
  const [workers, run] = await Promise.all([askLeader("workers"), leaderBase() === state.bases[state.base] ? state.run : askLeader("run")]);
  const wanted = $("fleet-filter").value.trim().toLowerCase();
  const shown = wanted ? workers.filter((w) => `${w.worker_id} ${w.host} ${w.state} ${w.role}`.toLowerCase().includes(wanted)) : workers;
  workersTable.show(shown, (tr, w) => { tr.lastChild.firstChild.disabled = !["running", "spare", "starting", "suspect"].includes(w.state); });
  controllersTable.show(state.run.controllers);
  const living = workers.filter((w) => !["dead", "stopped"].includes(w.state)).length;
  put($("workers-count"), `${whole(living)} up${shown.length === workers.length ? "" : `, ${whole(shown.length)} shown`}`);
  const p = run.proposed, differs = Object.keys(p).length > 0;
  $("proposal").hidden = !differs;
  put($("proposal"), differs ? `The autoscaler would have ${p.policy} policy replica${p.policy === 1 ? "" : "s"} and ${p.rollout} rollout worker${p.rollout === 1 ? "" : "s"}: ${run.proposed_why}.` : "");
  $("provider").hidden = !run.provider_trouble;
  put($("provider"), run.provider_trouble ? `The fleet differs from the desired counts: ${run.provider_trouble}` : "");
  const bad = run.sinks.filter((s) => s.failing);
  $("sinks").hidden = !bad.length;
  put($("sinks"), bad.map((s) => `Curves do not reach ${s.name}: ${s.trouble || "it does not answer"}. The run goes on, and it gets what it misses once it is back.`).join(" "));
  for (const role of ["policy", "rollout"]) if (!scaleTyped.has(role)) $("scale-" + role).value = state.run.desired[role] ?? "";
}

// ---- samples ------------------------------------------------------------------------------------

const groupsTable = new Table($("groups-table"), [
  { title: "group", head: true, node: (g) => { const b = make("button", "link", g.group_id); b.type = "button"; b.addEventListener("click", () => choose(g.group_id)); return b; } },
  { title: "state", value: (g) => (g.reason ? `dropped: ${g.reason}` : g.state) }, { title: "reward", num: true, value: (g) => (g.sequences ? g.reward_mean.toFixed(3) : "–") }, { title: "± spread", num: true, value: (g) => (g.sequences ? g.reward_std.toFixed(3) : "–") },
  { title: "tokens", num: true, value: (g) => (g.sequences ? whole(g.tokens) : "–") }, { title: "stale", num: true, value: (g) => (g.reason ? "–" : String(g.staleness)) }, { title: "step", num: true, value: (g) => (g.step ? String(g.step) : "–") },
  { title: "versions", num: true, value: (g) => (!g.sequences ? "–" : g.min_version === g.max_version ? String(g.min_version) : `${g.min_version}–${g.max_version}`) }, { title: "by", value: (g) => g.owner + (g.detail ? ` (${g.detail.slice(0, 80)})` : "") },
], (g) => `${g.group_id}/${g.attempt}${g.reason || ""}`, "Groups");
async function samples() {
  const groupState = $("groups-stand").value, dropped = state.run ? state.run.tasks.dropped : {};
  showReasons(Object.keys(dropped), groupState === "dropped");
  const query = new URLSearchParams({ limit: "100", sort: $("groups-sort").value });
  if (groupState) query.set("state", groupState);
  if (groupState === "dropped" && $("groups-reason").value) query.set("reason", $("groups-reason").value);
  for (const [id, name] of [["groups-min", "min_reward"], ["groups-max", "max_reward"], ["groups-long", "min_tokens"], ["groups-most", "max_tokens"], ["groups-step", "step"]]) if ($(id).value !== "" && $(id).validity.valid) query.set(name, $(id).value);
  const found = await ask("groups?" + query);
  const counts = Object.entries(dropped).map(([k, v]) => `${whole(v)} ${k}`).join(", ");
  const kept = groupState === "dropped" ? (counts ? `Dropped so far: ${counts}. The newest of each are listed; their samples are deleted.` : "Nothing has been dropped.") : "Samples are kept until a checkpoint covers their step.";
  put($("groups-count"), (found.total ? `${whole(found.groups.length)} of ${whole(found.total)} groups. ` : groupState === "dropped" ? "" : "No group matches. ") + kept);
  groupsTable.show(found.groups, (tr, g) => tr.setAttribute("aria-selected", String(g.group_id === state.group)));
}

function showReasons(reasons, wanted) {
  const select = $("groups-reason"), chosen = select.value;
  $("groups-reason-label").hidden = !wanted;
  const names = ["", ...reasons.sort()];
  if ([...select.options].map((o) => o.value).join("\n") === names.join("\n")) return;
  select.replaceChildren(...names.map((name) => { const o = make("option", "", name || "any reason"); o.value = name; return o; }));
  select.value = names.includes(chosen) ? chosen : "";
}

async function choose(id) {
  state.group = id;
  try { showGroup(await ask(`groups/${encodeURIComponent(id)}`)); } catch (error) { $("group").replaceChildren(make("p", "hint", error instanceof Refusal ? error.message : "No controller answers.")); }
  samples().catch(() => {});
}

let shading = "logprob";
function showGroup(g) {
  const head = make("header");
  const stale = g.staleness === 1 ? "1 step stale" : `${g.staleness} steps stale`;
  head.append(make("h2", "", g.group_id), make("span", "facts", `reward ${g.reward_mean.toFixed(3)} ± ${g.reward_std.toFixed(3)}   ${stale}   generated in ${seconds(g.generate_s)}, scored in ${seconds(g.reward_s)}   by ${g.owner}`));
  const label = make("label", "facts", "Shade "), select = make("select");
  for (const [value, text] of [["logprob", "by log-prob: strongest where least likely"], ["advantage", "by advantage"], ["none", "nothing"]]) { const o = make("option", "", text); o.value = value; o.selected = value === shading; select.append(o); }
  select.addEventListener("change", () => { shading = select.value; showGroup(g); });
  label.append(select); head.append(label);
  const list = make("div", "completions");
  g.completions.forEach((c, n) => list.append(completion(c, n)));
  const prompt = make("pre", "prompt", g.prompt || "(no text was handed in)");
  prompt.tabIndex = 0; prompt.setAttribute("aria-label", "Prompt");
  $("group").replaceChildren(head, prompt, list);
}

function completion(c, n) {
  const box = make("section", "completion");
  const title = make("h3"); title.append(make("span", "", `Completion ${n + 1}`), make("span", c.advantage > 0 ? "good" : c.advantage < 0 ? "bad" : "", `reward ${number(c.reward)}`));
  const parts = Object.entries(c.reward_components).map(([k, v]) => `${k} ${number(v)}`);
  parts.push(`advantage ${c.advantage >= 0 ? "+" : "−"}${Math.abs(c.advantage).toFixed(2)}`, `${c.tokens.length} tokens`, c.finish_reason, c.versions.length > 1 ? "versions " + c.versions.map(([v]) => v).join(" → ") : `version ${c.versions.length ? c.versions[0][0] : "?"}`);
  const text = make("pre"), chars = [...c.text], edges = new Map();
  let at = 0;
  c.versions.forEach(([v, length], i) => { if (i) edges.set(at, v); at += length; });
  const look = (i) => { const l = c.logprobs[i]; const shade = shading === "advantage" ? (c.advantage > 0 ? "p1" : c.advantage < 0 ? "n1" : "") : shading === "logprob" && l < -0.1 ? (l < -4 ? "h4" : l < -2 ? "h3" : l < -0.7 ? "h2" : "h1") : ""; return shade + (edges.has(i) ? " bound-left" : ""); };
  const told = (i) => `token ${c.tokens[i]}, log-prob ${c.logprobs[i].toFixed(2)}` + (edges.has(i) ? `, from here on version ${edges.get(i)}` : "");
  // Where tokens are characters (one more ends the text) the text itself is shaded, else a strip.
  const byChar = chars.length && chars.length <= 2000 && (chars.length === c.tokens.length || chars.length + 1 === c.tokens.length);
  if (byChar) chars.forEach((ch, i) => { const s = make("span", look(i), ch); s.title = told(i); text.append(s); }); else text.textContent = c.text || "(no text was handed in)";
  box.append(title, make("p", "parts", parts.join("   ")), text);
  if (!byChar && shading !== "none") { const strip = make("div", "tokens"); strip.setAttribute("role", "img"); strip.setAttribute("aria-label", `Log-probabilities of ${c.tokens.length} tokens`); for (let i = 0; i < Math.min(c.tokens.length, 2000); i++) { const s = make("i", look(i)); s.title = told(i); strip.append(s); } box.append(make("p", "hint", "A token is not a character here: each has a bar of its own, in their order, below the text."), strip); }
  return box;
}

// ---- events -------------------------------------------------------------------------------------

function eventItem(e) {
  const li = make("li", e.severity), at = new Date(e.t * 1000), time = make("time", "", at.toLocaleTimeString("en-GB"));
  time.dateTime = at.toISOString(); time.title = at.toLocaleString("en-GB");
  // Runs take days.
  if (at.toDateString() !== new Date().toDateString()) time.prepend(at.toLocaleDateString("en-GB", { day: "numeric", month: "short" }) + " ");
  li.append(time);
  if (e.severity === "fault") li.append(make("span", "sev", "fault"));
  li.append(make("span", "what", e.text));
  const more = [];
  if (e.noticed) more.push(`Noticed because ${e.noticed}.`);
  if (e.mesh_s !== null) more.push(`The mesh stood again ${seconds(e.mesh_s)} later.`);
  if (e.commit_s !== null) more.push(`The next step was committed ${seconds(e.commit_s)} later.`);
  if (more.length) li.append(make("p", "more", more.join(" ")));
  return li;
}
let eventsShown = "";
async function events() {
  const found = await ask(`events?kind=${$("events-kind").value}&limit=300`);
  const wanted = $("events-filter").value.trim().toLowerCase();
  const shown = found.events.filter((e) => !wanted || e.text.toLowerCase().includes(wanted)).reverse();
  const mark = JSON.stringify(shown.map((e) => [e.id, e.mesh_s, e.commit_s]));
  if (mark === eventsShown) return;
  eventsShown = mark;
  $("events-list").replaceChildren(...shown.map(eventItem));
}

async function watchFaults() {
  const found = await ask("events?kind=faults&limit=5&newest=true" + (state.lastEvent ? `&since=${state.lastEvent}` : ""));
  if (state.lastEvent !== null && found.events.length) { const e = found.events[found.events.length - 1]; say(e.text + (e.noticed ? `: ${e.noticed}` : ""), true); state.lastStep = -1; }
  state.lastEvent = found.next;
}

// ---- the page -----------------------------------------------------------------------------------

const VIEWS = { learning, flow, fleet, samples, events };
let running = false;
async function tick() {
  if (running) return;
  running = true;
  try {
    showRun(await ask("run"));
    state.failed = 0;
    await Promise.all([VIEWS[state.tab](), watchFaults()]);
  } catch (error) {
    if (!(error instanceof Refusal)) {
      state.failed += 1;
      put($("link"), state.failed > 1 ? "no controller answers; trying on" : "looking for another controller");
      $("link").className = "bad";
    } else { put($("link"), error.message); }
  } finally { running = false; }
}
function select(name, focus) {
  state.tab = name; state.lastStep = -1;
  for (const tab of document.querySelectorAll("[role=tab]")) {
    const chosen = tab.id === "tab-" + name;
    tab.setAttribute("aria-selected", String(chosen)); tab.tabIndex = chosen ? 0 : -1;
    $(tab.getAttribute("aria-controls")).hidden = !chosen;
    if (chosen && focus) tab.focus();
  }
  history.replaceState(null, "", "#/" + name);
  tick(); draw();
}
$("tabs").addEventListener("click", (e) => { if (e.target.role === "tab" || e.target.getAttribute("role") === "tab") select(e.target.id.slice(4)); });
$("tabs").addEventListener("keydown", (e) => {
  const names = Object.keys(VIEWS), at = names.indexOf(state.tab);
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: names.length - 1 }[e.key];
  if (to !== undefined) { e.preventDefault(); select(names[(to + names.length) % names.length], true); }
});
$("smooth").addEventListener("input", (e) => { board.weight = Number(e.target.value); board.redraw(); });
$("zoom-reset").addEventListener("click", () => board.zoom(null, null));
for (const id of ["zoom-from", "zoom-to"]) $(id).addEventListener("change", () => {
  const [from, to] = [$("zoom-from").value, $("zoom-to").value];
  const a = Number(from || 0), b = to ? Number(to) : state.run ? state.run.step : 0;
  if (!from && !to) board.zoom(null, null);
  else if (Number.isInteger(a) && Number.isInteger(b) && 0 <= a && a < b) board.zoom(a, b);
  else put($("zoom-hint"), "Name a step and a later one.");
});
$("do-pause").addEventListener("click", () => (state.run && state.run.phase === "paused" ? command("resume", "Resume the run?", "Prompts are handed out again.", "Resume") : command("pause", "Pause the run?", "The open step is finished; nothing new is handed out until someone resumes.", "Pause")));
$("do-checkpoint").addEventListener("click", () => command("checkpoint", "Write a checkpoint?", "The trainers write one after the next step, beside the regular ones.", "Write"));
$("do-stop").addEventListener("click", () => command("stop", "End the run for good?", "The open step is finished, a last checkpoint is written, and the run ends. It cannot be resumed.", "End the run", { reason: "stopped from the dashboard" }, true));
for (const role of ["policy", "rollout"]) $("scale-" + role).addEventListener("input", () => { scaleTyped.add(role); });
$("scale-form").addEventListener("submit", async (e) => {
  e.preventDefault();
  const now = state.run.desired, wanted = {}, expected = {}, told = [];
  for (const [role, words] of [["policy", "Policy replicas"], ["rollout", "Rollout workers"]]) {
    const count = Number($("scale-" + role).value);
    if (!scaleTyped.has(role) || count === now[role]) continue;
    wanted[role] = count;
    if (now[role] !== undefined) expected[role] = now[role];
    told.push(`${words}: ${now[role] ?? "–"} → ${count}.`);
  }
  if (told.length) await command("scale", "Change the fleet?", told.join(" "), "Scale", { ...wanted, expected });
  else say("These are the desired counts already.");
  scaleTyped.clear();
  tick();
});
for (const id of ["groups-sort", "groups-stand", "groups-reason", "groups-min", "groups-max", "groups-long", "groups-most", "groups-step", "events-kind", "events-filter", "fleet-filter"]) $(id).addEventListener("input", () => tick());
$("groups-form").addEventListener("submit", (e) => e.preventDefault());
const THEMES = { "": "as the system has it", light: "light", dark: "dark" };
function theme(name) {
  if (name) document.documentElement.dataset.theme = name; else delete document.documentElement.dataset.theme;
  $("theme").setAttribute("aria-label", `Colours: ${THEMES[name]}`); $("theme").title = `Colours: ${THEMES[name]}`;
  localStorage.setItem("paceline-theme", name);
  colours = null; draw();
}
$("theme").addEventListener("click", () => { const names = Object.keys(THEMES); theme(names[(names.indexOf(document.documentElement.dataset.theme || "") + 1) % names.length]); });
theme(localStorage.getItem("paceline-theme") in THEMES ? localStorage.getItem("paceline-theme") : "");
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { colours = null; draw(); });
new ResizeObserver(() => board.redraw()).observe($("charts"));
// With a slash: an address that named a section's id would make the browser scroll to it.
const named = () => { const name = location.hash.slice(2); return Object.hasOwn(VIEWS, name) ? name : ""; };
window.addEventListener("hashchange", () => { if (named() && named() !== state.tab) select(named()); });
select(named() || "learning");
setInterval(() => { if (!document.hidden || state.failed) tick(); }, 1000);
document.addEventListener("visibilitychange", () => { if (!document.hidden) tick(); });
