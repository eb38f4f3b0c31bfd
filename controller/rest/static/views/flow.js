// The view "Flow": where the groups are, their staleness, and what a step's time goes to.

import { answeredByLeader, askLeader } from "../api.js";
import { $, make, put, svg } from "../dom.js";
import { number, plural, seconds, whole } from "../format.js";
import { state } from "../state.js";

const STATIONS = [
  ["pending", "waiting again"],
  ["leased", "being generated"],
  ["ready", "ready"],
  ["in_step", "in the step"],
  ["trained", "trained"],
];
const PARTS = [
  ["wait", "waiting for groups", "second"],
  ["compute", "computing", "bar"],
  ["reduce", "summing gradients", "third"],
  ["commit", "committing", "quietbar"],
  ["publish", "publishing weights", "quietbar"],
  ["generate", "generating (a group)", "bar"],
  ["reward", "scoring (a group)", "quietbar"],
];
// Of tokens, in steps.
const AGES = ["0", "1", "2", "3_4", "5_8", "9_16", "17_32", "33_up"];

const picture = drawPipeline();

function drawPipeline() {
  const root = svg("svg", { viewBox: "0 0 982 190", "aria-hidden": "true" });
  const role = { class: "role", y: 14, width: 170, height: 162, rx: 10 };
  root.append(svg("rect", { ...role, x: 206 }), svg("rect", { ...role, x: 606 }));
  const caption = (x, y) => svg("text", { x, y, class: "soft mid" });
  const parts = {
    rollout: caption(291, 36),
    made: caption(291, 164),
    policy: caption(691, 36),
    wait: caption(691, 164),
    rate: caption(891, 164),
    counts: {},
    boxes: {},
    pulses: [],
  };
  STATIONS.forEach(([name, label], n) => {
    const x = 20 + n * 200;
    parts.boxes[name] = svg("rect", { class: "box", x, y: 52, width: 142, height: 86, rx: 8 });
    parts.counts[name] = svg("text", { x: x + 71, y: 98, class: "big mid" });
    const words = svg("text", { x: x + 71, y: 122, class: "soft mid" }, label);
    root.append(parts.boxes[name], parts.counts[name], words);
    if (n === STATIONS.length - 1) return;
    const d = `M ${x + 146} 95 H ${x + 196}`;
    const pulse = svg("path", { d, class: "pulse" });
    parts.pulses.push(pulse);
    root.append(svg("path", { d, class: "pipe" }), pulse);
  });
  root.append(parts.rollout, parts.policy, parts.wait, parts.made, parts.rate);
  $("pipeline").append(root);
  return parts;
}

export async function flow() {
  const run = answeredByLeader() ? state.run : await askLeader("run");
  put($("bottleneck"), run.bottleneck);
  const times = {};
  for (const [name] of PARTS) times[name] = run.metrics[`time_${name}_s`];
  showPipeline(run, times);
  showStaleness(run);
  showAges(run);
  showTimes(run, times);
}

function showPipeline(f, times) {
  // In place of the picture, on a screen that is too narrow for it.
  const items = STATIONS.map(([name, label]) => {
    const item = make("li", "", label);
    item.prepend(make("b", "", whole(f.tasks[name])));
    return item;
  });
  $("stations").replaceChildren(...items);
  for (const [name] of STATIONS) {
    put(picture.counts[name], whole(f.tasks[name]));
    const busy = f.tasks[name] && name !== "trained";
    picture.boxes[name].setAttribute("class", busy ? "box busy" : "box");
  }
  const moving = state.run && state.run.phase === "running";
  const active = [f.tasks.leased, f.tasks.leased, f.tasks.ready, true];
  picture.pulses.forEach((pulse, n) => {
    pulse.setAttribute("class", moving && active[n] ? "pulse" : "pulse still");
  });
  put(picture.rollout, plural(f.workers.rollout, "rollout worker"));
  put(picture.policy, plural(f.workers.policy, "policy replica"));
  put(picture.made, times.generate !== undefined ? `${seconds(times.generate)} a group` : "");
  const known = times.wait !== undefined && f.metrics.step_s;
  const share = known ? Math.round(Math.min(1, times.wait / f.metrics.step_s) * 100) : 0;
  put(picture.wait, known ? `${share}% of a step waiting` : "");
  put(picture.rate, `${f.stalled_s ? "–" : number(f.metrics.tokens_per_s ?? null)} tokens/s`);
  const dropped = Object.entries(f.tasks.dropped).map(([reason, n]) => `${n} ${reason}`);
  const counts = STATIONS.map(([name, label]) => `${f.tasks[name]} ${label}`).join(", ");
  const text = dropped.length ? `${counts}; dropped: ${dropped.join(", ")}` : counts;
  put($("pipeline-text"), text);
}

function showStaleness(f) {
  const top = Math.max(f.max_staleness + 1, ...Object.keys(f.staleness).map(Number));
  const most = Math.max(1, ...Object.values(f.staleness));
  const root = svg("svg", { viewBox: "0 0 460 190", "aria-hidden": "true" });
  const w = Math.min(70, 420 / (top + 1));
  for (let age = 0; age <= top; age++) {
    const count = f.staleness[age] || 0;
    const height = (count / most) * 120;
    const x = 20 + age * w;
    const look = age > f.max_staleness ? "bar over" : "bar";
    root.append(
      svg("rect", { class: look, x: x + 4, y: 150 - height, width: w - 8, height, rx: 2 }),
      svg("text", { x: x + w / 2, y: 168, class: "soft mid" }, String(age)),
    );
    const over = { x: x + w / 2, y: 144 - height, class: "mid" };
    if (count) root.append(svg("text", over, String(count)));
  }
  const bound = 20 + (f.max_staleness + 1) * w;
  root.append(
    svg("line", { class: "axis", x1: 20, x2: 440, y1: 150.5, y2: 150.5 }),
    svg("line", { class: "bound", x1: bound, x2: bound, y1: 14, y2: 150 }),
    svg("text", { x: bound + 6, y: 24, class: "soft" }, `bound: ${f.max_staleness}`),
  );
  $("staleness").replaceChildren(root);
  const counts = Object.entries(f.staleness).map(([age, n]) => `${n} at ${age}`);
  const text = counts.length
    ? `Groups by age of their oldest token, in steps: ${counts.join(", ")}.`
    : "Nothing is in flight.";
  put($("staleness-text"), `${text} The bound is ${f.max_staleness}.`);
}

function showAges(f) {
  const root = svg("svg", { viewBox: "0 0 460 190", "aria-hidden": "true" });
  const named = AGES.map((age) => [age, f.metrics[`token_age_${age}`]]);
  const shares = named.filter(([, share]) => share !== undefined);
  const most = Math.max(1e-9, ...shares.map(([, share]) => share));
  const w = 420 / Math.max(1, shares.length);
  shares.forEach(([age, share], n) => {
    const height = (share / most) * 120;
    const x = 20 + n * w;
    root.append(
      svg("rect", { class: "bar", x: x + 4, y: 150 - height, width: w - 8, height, rx: 2 }),
      svg(
        "text",
        { x: x + w / 2, y: 168, class: "soft mid" },
        age.replace("_up", "+").replace("_", "-"),
      ),
    );
    const over = { x: x + w / 2, y: 144 - height, class: "mid" };
    if (share) root.append(svg("text", over, percent(share)));
  });
  root.append(svg("line", { class: "axis", x1: 20, x2: 440, y1: 150.5, y2: 150.5 }));
  $("ages").replaceChildren(root);
  put($("ages-text"), agesText(f));
}

function agesText(f) {
  const a = f.metrics;
  if (a.late_share === undefined) return "Nothing is trained yet.";
  const length = (name, where = "") => {
    const tokens = a[`${name}_response_tokens_mean`];
    return tokens === undefined ? "" : ` (${where}${number(tokens)} tokens long)`;
  };
  const fates =
    f.late_groups === "train"
      ? `${percent(a.late_share)} of groups late${length("late")}, ` +
        `${percent(a.masked_share)} of tokens masked, older than ${plural(f.max_token_age, "step")}` +
        `${length("masked", "in groups ")}, `
      : "";
  const ess = (a.ess ?? null) === null ? "" : ` Effective sample size ${percent(a.ess)}.`;
  return (
    `Newest step, age in steps: ${fates}${percent(a.dropped_share)} of groups dropped for their age` +
    `${length("dropped")}. All that is trained is ${number(a.response_tokens_mean)} tokens long.${ess}`
  );
}

const percent = (share) => `${(100 * share).toFixed(share && share < 0.095 ? 1 : 0)}%`;

function showTimes(f, times) {
  const root = svg("svg", { viewBox: "0 0 460 190", "aria-hidden": "true" });
  const parts = PARTS.filter(([name]) => times[name] !== undefined);
  const most = Math.max(1e-9, f.metrics.step_s ?? 0, ...parts.map(([name]) => times[name]));
  parts.forEach(([name, label, look], n) => {
    const y = 18 + n * 24;
    const length = (times[name] / most) * 230;
    const text = times[name] < 0.1 ? `${Math.round(times[name] * 1000)} ms` : seconds(times[name]);
    root.append(
      svg("text", { x: 150, y: y + 11, class: "soft end" }, label),
      svg("rect", { class: look, x: 160, y, width: Math.max(1, length), height: 14, rx: 2 }),
      svg("text", { x: 168 + length, y: y + 11 }, text),
    );
  });
  $("split").replaceChildren(root);
}
