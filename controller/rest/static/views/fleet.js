// The view "Fleet": controllers and workers, scaling and draining, faults.

import { answeredByLeader, askLeader } from "../api.js";
import { confirmCommand, notify } from "../dialog.js";
import { $, button, make, put } from "../dom.js";
import { bytes, number, plural, seconds, whole } from "../format.js";
import { state } from "../state.js";
import { Table } from "../table.js";
import { faults } from "./faults.js";

const LOOKS = {
  running: "good",
  leader: "good",
  starting: "warn",
  draining: "warn",
  suspect: "warn",
  blocked: "warn",
  silent: "bad",
  dead: "bad",
};
const DRAINABLE = ["running", "spare", "starting", "suspect", "blocked"];
const GONE = ["dead", "stopped"];
const LATE_S = 2;
const SCORER = "scorer:";
const SIDES = { policy: "trains", rollout: "generates" };

const lookOf = (row) => `state ${LOOKS[row.state] || ""}`;
const isLeader = (c) => c.state === "leader" && state.run;

// A term is the millisecond in which it was granted.
const since = (term) => (term > 1e12 ? new Date(term).toLocaleString("en-GB") : "");

const controllersTable = new Table(
  $("controllers-table"),
  [
    { title: "controller", head: true, value: (c) => c.controller_id },
    { title: "state", value: (c) => c.state, class: lookOf },
    { title: "host", value: (c) => c.host },
    { title: "pid", num: true, value: (c) => String(c.pid) },
    { title: "heard", num: true, value: (c) => seconds(c.heartbeat_age_s) },
    { title: "leads since", value: (c) => (isLeader(c) ? since(state.run.term) : "") },
    { title: "dashboard", value: (c) => c.rest },
  ],
  (c) => c.controller_id,
  "Controllers",
);

const devicesTable = new Table(
  $("devices-table"),
  [
    { title: "devices", head: true, value: (s) => s.name },
    { title: "side", value: (s) => SIDES[s.role] ?? "–" },
    { title: "holder", value: (s) => (s.asked ? `${s.holder}, parks` : s.holder || "nobody") },
    { title: "since", num: true, value: (s) => seconds(s.since_s) },
    { title: "why", value: (s) => s.why },
  ],
  (s) => s.name,
  "Devices that workers use in turn",
);

function gpuText(gauges) {
  if (gauges.gpu_memory_bytes === undefined) return "–";
  const busy = gauges.gpu_utilization;
  const share = busy === undefined ? "" : `, ${Math.round(busy * 100)}% busy`;
  return bytes(gauges.gpu_memory_bytes) + share;
}

// What a worker has before it: completions that wait for a scorer, or tasks that it holds.
export function waitingText({ held_leases, gauges }) {
  const queued = Math.round(gauges.queued ?? 0);
  if (queued) return ` (${plural(queued, "completion")} waiting)`;
  return held_leases ? ` (${plural(held_leases, "task")})` : "";
}

function drainButton(worker) {
  const id = worker.worker_id;
  const newest = () => workersTable.data.find((w) => w.worker_id === id) || worker;
  const made = button("small", "Drain", () => drain(newest()));
  made.setAttribute("aria-label", `Drain ${id}`);
  return made;
}

const workersTable = new Table(
  $("workers-table"),
  [
    { title: "worker", head: true, value: (w) => w.worker_id },
    { title: "role", value: (w) => w.role },
    { title: "state", value: (w) => w.state, class: lookOf },
    {
      title: "doing",
      value: (w) => w.activity + waitingText(w),
    },
    {
      title: "heard",
      num: true,
      value: (w) => seconds(w.heartbeat_age_s),
      class: (w) => (w.heartbeat_age_s > LATE_S ? "num warn" : "num"),
    },
    { title: "mesh", num: true, value: (w) => (w.mesh_epoch ? String(w.mesh_epoch) : "–") },
    { title: "version", num: true, value: (w) => (w.version < 0 ? "–" : String(w.version)) },
    {
      title: "memory",
      num: true,
      value: (w) => bytes(w.gauges.memory_bytes ?? w.gauges.rss_bytes),
    },
    { title: "GPU", num: true, value: (w) => gpuText(w.gauges) },
    { title: "tokens/s", num: true, value: (w) => number(w.gauges.tokens_per_s) },
    { title: "host", value: (w) => w.host },
    { title: "pid", num: true, value: (w) => String(w.pid) },
    { title: "steer", node: drainButton },
  ],
  (w) => w.worker_id,
  "Workers",
);

function drain(worker) {
  const ask = {
    title: `Drain ${worker.worker_id}?`,
    text: "It finishes what it holds and leaves, and the desired count drops by one.",
    option: "Start another in its place",
    yes: "Drain",
  };
  const { worker_id, incarnation } = worker;
  return confirmCommand("drain", ask, (replace) => ({ worker_id, incarnation, replace }));
}

// Only counts that the user typed are sent: an open page then undoes nobody else's change.
const typed = new Set();

export async function fleet() {
  const [workers, run] = await Promise.all([
    askLeader("workers"),
    answeredByLeader() ? state.run : askLeader("run"),
    faults(),
  ]);
  const filter = $("fleet-filter").value.trim().toLowerCase();
  const textOf = (w) => `${w.worker_id} ${w.host} ${w.state} ${w.role}`.toLowerCase();
  const shown = filter ? workers.filter((w) => textOf(w).includes(filter)) : workers;
  workersTable.show(shown, (tr, w) => {
    tr.lastChild.firstChild.disabled = !DRAINABLE.includes(w.state);
  });
  controllersTable.show(state.run.controllers);
  $("devices").hidden = !run.seats.length;
  devicesTable.show(run.seats);
  const up = whole(workers.filter((w) => !GONE.includes(w.state)).length);
  const some = shown.length < workers.length ? `, ${whole(shown.length)} shown` : "";
  put($("workers-count"), `${up} up${some}`);
  showHints(run);
  const desired = desiredOf(state.run);
  for (const pool of poolsOf(desired))
    if (!typed.has(pool)) inputOf(pool).value = desired[pool] ?? "";
}

// Counts that can be scaled: of workers by pool, and of pairs that train if devices are lent.
function desiredOf({ desired, training_seats }) {
  return training_seats ? { ...desired, training: training_seats } : desired;
}

function poolsOf(desired) {
  const others = Object.keys(desired).filter((p) => p.startsWith(SCORER) || p === "training");
  return ["policy", "rollout", ...others.sort()];
}

function titleOf(pool) {
  const roles = {
    policy: "Policy replicas",
    rollout: "Rollout workers",
    training: "Pairs that train",
  };
  return roles[pool] ?? `Scorers ${pool.slice(SCORER.length)}`;
}

// The field of a pool. A scorer's is made when the run is first seen to have it.
function inputOf(pool) {
  const known = $(`scale-${pool}`);
  if (known) return known;
  const input = $("scale-rollout").cloneNode();
  input.id = `scale-${pool}`;
  input.value = "";
  input.addEventListener("input", () => typed.add(pool));
  const label = make("label", "", `${titleOf(pool)} `);
  label.append(input);
  $("scale-form").querySelector("button").before(label);
  return input;
}

function showHints(run) {
  const { policy, rollout } = run.proposed;
  const counts = `${plural(policy, "policy replica")} and ${plural(rollout, "rollout worker")}`;
  const differs = Object.keys(run.proposed).length > 0;
  hint("proposal", differs ? `The autoscaler proposes ${counts}: ${run.proposed_why}.` : "");
  const trouble = run.provider_trouble;
  hint("provider", trouble ? `The fleet is not at its desired counts: ${trouble}` : "");
  const failing = run.sinks.filter((s) => s.failing).map(failureText);
  hint("sinks", failing.join(" "));
}

function failureText(sink) {
  const why = sink.trouble || "it does not answer";
  return `Curves do not reach ${sink.name}: ${why}. The run goes on, and it gets what it misses once it is back.`;
}

function hint(id, text) {
  $(id).hidden = !text;
  put($(id), text);
}

async function scale() {
  const now = desiredOf(state.run);
  const desired = {};
  const expected = {};
  const changes = [];
  for (const pool of poolsOf(now)) {
    const count = Number(inputOf(pool).value);
    if (!typed.has(pool) || count === now[pool]) continue;
    desired[pool] = count;
    if (now[pool] !== undefined) expected[pool] = now[pool];
    changes.push(`${titleOf(pool)}: ${now[pool] ?? "–"} → ${count}.`);
  }
  if (changes.length) {
    const ask = { title: "Change the fleet?", text: changes.join(" "), yes: "Scale" };
    await confirmCommand("scale", ask, () => ({ desired, expected }));
  } else notify("These are the desired counts already.");
  typed.clear();
}

export function installScaling(refresh) {
  for (const pool of poolsOf({})) inputOf(pool).addEventListener("input", () => typed.add(pool));
  $("scale-form").addEventListener("submit", async (e) => {
    e.preventDefault();
    await scale();
    refresh();
  });
}
