// The dashboard: header, views and the refresh every second. What a controller answers is shown as
// text, never as markup.

import { ask, learnControllers, Refusal, storeToken } from "./api.js";
import { confirmCommand } from "./dialog.js";
import { $, put } from "./dom.js";
import { number, plural, seconds, whole } from "./format.js";
import { state } from "./state.js";
import { events, watchFaults } from "./views/events.js";
import { fleet, installScaling } from "./views/fleet.js";
import { flow } from "./views/flow.js";
import { draw, learning, recolour } from "./views/learning.js";
import { samples } from "./views/samples.js";
import { settings } from "./views/settings.js";
import { timeline } from "./views/timeline.js";
import { watchWhy } from "./views/why.js";

const REFRESH_MS = 1000;
const VIEWS = { learning, flow, timeline, fleet, samples, events, settings };

// ---- header -------------------------------------------------------------------------------------

const PHASES = {
  running: "good",
  finished: "good",
  paused: "warn",
  waiting: "warn",
  suspending: "warn",
  suspended: "warn",
  stopping: "warn",
  failed: "bad",
};

const OVER = ["finished", "failed", "suspended"];
const isOver = (run) => OVER.includes(run.phase);

// Workers that are alive, of those that should be: a run that has lost some is not well.
function countWorkers(run) {
  const wanted = Object.entries(run.desired);
  if (isOver(run) || !wanted.length) return { text: "–", short: false };
  const alive = wanted.map(([pool, count]) => Math.min(run.workers[pool] ?? 0, count));
  const sum = (counts) => counts.reduce((a, b) => a + b, 0);
  const [up, all] = [sum(alive), sum(wanted.map(([, count]) => count))];
  return { text: `${whole(up)} of ${whole(all)}`, short: up < all };
}

function showRun(run) {
  state.run = run;
  const spare = learnControllers(run.controllers);
  document.title = `${run.run_name} · step ${run.step} · Paceline`;
  put($("run-name"), run.run_name);
  const workers = countWorkers(run);
  const look = PHASES[run.phase] || "bad";
  const short = look === "good" && !isOver(run) && (workers.short || state.trouble);
  put($("phase"), run.phase);
  $("phase").className = `pill ${short ? "warn" : look}`;
  put($("v-workers"), workers.text);
  $("v-workers").className = workers.short ? "bad" : "";
  put($("v-step"), `${whole(run.step)} / ${whole(run.total_steps)}`);
  $("v-progress").max = run.total_steps || 1;
  $("v-progress").value = run.step;
  const m = run.metrics;
  const stale = `${number(m.staleness_mean)}, max ${number(m.staleness_max)}`;
  put($("v-reward"), "reward_mean" in m ? m.reward_mean.toFixed(3) : "–");
  put($("v-tokens"), "tokens_per_s" in m && !run.stalled_s ? number(m.tokens_per_s) : "–");
  put($("v-stale"), "staleness_max" in m ? stale : "–");
  put($("v-left"), run.stalled_s ? "–" : seconds(run.time_left_s));
  put($("v-leader"), run.leader || "–");
  put($("v-leader-label"), run.failovers ? `leader (change ${run.failovers})` : "leader");
  const over = isOver(run);
  put($("do-pause"), run.phase === "paused" ? "Resume" : "Pause");
  for (const id of ["do-pause", "do-checkpoint", "do-stop"]) $(id).disabled = over;
  const changed = Object.entries(run.changed).map(
    ([name, c]) =>
      `${name} ${JSON.stringify(c.old)} → ${JSON.stringify(c.new)} from step ${c.step}`,
  );
  put($("reward-trouble"), run.reward_trouble);
  $("reward-trouble").hidden = !run.reward_trouble;
  const notes = changed.length ? [`Changed since the start: ${changed.join("; ")}`] : [];
  if (run.reason && !over) notes.unshift(`Beside the steps: ${run.reason}.`);
  put($("changed"), notes.join(" "));
  $("changed").hidden = !notes.length;
  const others = spare ? `, ${plural(spare, "other")} in reach` : "";
  put($("link"), `answered by ${run.served_by}${others}`);
  $("link").className = "";
}

const COMMANDS = {
  pause: {
    title: "Pause the run?",
    text: "The open step is finished; nothing new is handed out until someone resumes.",
    yes: "Pause",
  },
  resume: { title: "Resume the run?", text: "Prompts are handed out again.", yes: "Resume" },
  checkpoint: {
    title: "Write a checkpoint?",
    text: "The trainers write one after the next step, beside the regular ones.",
    yes: "Write",
  },
  stop: {
    title: "End the run for good?",
    text: "The open step is finished, a last checkpoint is written, and the run ends. It cannot be resumed.",
    yes: "End the run",
    danger: true,
  },
};

$("do-pause").addEventListener("click", () => {
  const name = state.run?.phase === "paused" ? "resume" : "pause";
  confirmCommand(name, COMMANDS[name]);
});
$("do-checkpoint").addEventListener("click", () =>
  confirmCommand("checkpoint", COMMANDS.checkpoint),
);
$("do-stop").addEventListener("click", () =>
  confirmCommand("stop", COMMANDS.stop, () => ({ reason: "stopped from the dashboard" })),
);

// ---- refresh ------------------------------------------------------------------------------------

let refreshing = false;
async function refresh() {
  if (refreshing) return;
  refreshing = true;
  try {
    showRun(await ask("run"));
    state.failures = 0;
    await Promise.all([VIEWS[state.tab](), watchFaults(), watchWhy()]);
  } catch (error) {
    showError(error);
  } finally {
    refreshing = false;
  }
}

function showError(error) {
  if (error instanceof Refusal) {
    put($("link"), error.message);
    return;
  }
  state.failures += 1;
  const searching = state.failures === 1;
  put($("link"), searching ? "looking for another controller" : "no controller answers; trying on");
  $("link").className = "bad";
}

// ---- views --------------------------------------------------------------------------------------

function select(name, focus) {
  state.tab = name;
  state.drawnStep = -1;
  for (const tab of document.querySelectorAll("[role=tab]")) {
    const chosen = tab.id === `tab-${name}`;
    tab.setAttribute("aria-selected", String(chosen));
    tab.tabIndex = chosen ? 0 : -1;
    $(tab.getAttribute("aria-controls")).hidden = !chosen;
    if (chosen && focus) tab.focus();
  }
  history.replaceState(null, "", `#/${name}`);
  refresh();
  draw();
}

$("tabs").addEventListener("click", (e) => {
  if (e.target.getAttribute("role") === "tab") select(e.target.id.slice("tab-".length));
});
$("tabs").addEventListener("keydown", (e) => {
  const names = Object.keys(VIEWS);
  const at = names.indexOf(state.tab);
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: names.length - 1 }[e.key];
  if (to === undefined) return;
  e.preventDefault();
  select(names[(to + names.length) % names.length], true);
});
const INPUTS =
  "#groups-form select, #groups-form input, #events-kind, #events-filter, #fleet-filter, #lanes-span, #settings-filter";
for (const input of document.querySelectorAll(INPUTS))
  input.addEventListener("input", () => refresh());
installScaling(refresh);

// ---- theme --------------------------------------------------------------------------------------

const THEMES = { "": "as the system has it", light: "light", dark: "dark" };

function theme(name) {
  const root = document.documentElement;
  if (name) root.dataset.theme = name;
  else delete root.dataset.theme;
  const label = `Colours: ${THEMES[name]}`;
  $("theme").setAttribute("aria-label", label);
  $("theme").title = label;
  localStorage.setItem("paceline-theme", name);
  recolour();
}

$("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  const at = names.indexOf(document.documentElement.dataset.theme || "");
  theme(names[(at + 1) % names.length]);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);

// ---- start --------------------------------------------------------------------------------------

// With a slash: an address that named a section's id would make the browser scroll to it.
function namedView() {
  const name = location.hash.slice("#/".length);
  return Object.hasOwn(VIEWS, name) ? name : "";
}

// `paceline up` and `paceline status` print an address with the token behind its #, which no browser
// sends anywhere. It moves to this page's memory, out of the address and of its history.
const TOKEN_MARK = "#token=";
if (location.hash.startsWith(TOKEN_MARK)) {
  storeToken(decodeURIComponent(location.hash.slice(TOKEN_MARK.length)));
  history.replaceState(null, "", location.pathname);
}

const stored = localStorage.getItem("paceline-theme");
theme(stored in THEMES ? stored : "");
window.addEventListener("hashchange", () => {
  if (namedView() && namedView() !== state.tab) select(namedView());
});
select(namedView() || "learning");
setInterval(() => {
  if (!document.hidden || state.failures) refresh();
}, REFRESH_MS);
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) refresh();
});
