// The view "Samples": groups by state, reward and length; one group's completions token by token.

import { ask, askStandby, Refusal } from "../api.js";
import { $, button, make, option, put } from "../dom.js";
import { number, plural, seconds, whole } from "../format.js";
import { state } from "../state.js";
import { Table } from "../table.js";

const FILTERS = {
  "groups-min": "min_reward",
  "groups-max": "max_reward",
  "groups-long": "min_tokens",
  "groups-most": "max_tokens",
  "groups-step": "step",
  "groups-row": "row",
  "groups-text": "grep",
};
const SHADINGS = {
  logprob: "by log-prob: strongest where least likely",
  relative: "by relative reward",
  none: "nothing",
};
const MOST_TOKENS = 2000;
const NO_TEXT = "(no text was handed in)";

let chosen = null; // the group that is read
let chosenRow = null; // its row when it was last listed
let shownQuery = "";
let shading = "logprob";

// A fact of a line of facts is not cut at the line's end.
const unbroken = (text) => text.replaceAll(" ", "\u00a0");
const fixed = (v) => (v === null ? "–" : v.toFixed(3));

function versionsText(g) {
  if (g.min_version === null) return "–";
  if (g.min_version === g.max_version) return String(g.min_version);
  return `${g.min_version}–${g.max_version}`;
}

const groupsTable = new Table(
  $("groups-table"),
  [
    {
      title: "group",
      head: true,
      node: (g) => button("link", g.group_id, () => choose(g.group_id)),
    },
    { title: "state", value: (g) => (g.reason ? `dropped: ${g.reason}` : g.state) },
    { title: "reward", num: true, value: (g) => fixed(g.reward_mean) },
    { title: "± spread", num: true, value: (g) => fixed(g.reward_std) },
    { title: "tokens", num: true, value: (g) => whole(g.tokens) },
    { title: "stale", num: true, value: (g) => whole(g.staleness) },
    { title: "step", num: true, value: (g) => whole(g.step) },
    { title: "versions", num: true, value: versionsText },
    { title: "by", value: (g) => (g.owner || g.detail || "–").slice(0, 80) },
  ],
  (g) => `${g.group_id}/${g.attempt}${g.reason || ""}`,
  "Groups",
);

export async function samples() {
  const chosenState = $("groups-state").value;
  const dropped = state.run ? state.run.tasks.dropped : {};
  showReasons(Object.keys(dropped), chosenState === "dropped");
  const query = new URLSearchParams({ limit: "100", sort: $("groups-sort").value });
  if (chosenState) query.set("state", chosenState);
  const reason = $("groups-reason").value;
  if (chosenState === "dropped" && reason) query.set("reason", reason);
  for (const [id, name] of Object.entries(FILTERS))
    if ($(id).value !== "" && $(id).validity.valid) query.set(name, $(id).value);
  const asked = query.toString();
  // Rows do not move under a pointer: the list waits until it has left, or asks for something else.
  if (asked === shownQuery && $("groups-table").matches(":hover")) return;
  const found = await askStandby(`groups?${query}`);
  shownQuery = asked;
  keepChosen(found.groups);
  put($("groups-count"), countText(found, chosenState === "dropped" ? dropped : null));
  groupsTable.show(found.groups, (tr, g) => {
    tr.setAttribute("aria-selected", String(g.group_id === chosen));
  });
}

// The group that is read stays in the list, also once newer ones have pushed it out.
function keepChosen(groups) {
  const row = groups.find((g) => g.group_id === chosen);
  if (row) chosenRow = row;
  else if (chosenRow && chosenRow.group_id === chosen) groups.unshift(chosenRow);
}

// `dropped`: counts by reason if dropped groups are listed, else null.
function countText(found, dropped) {
  const counts = Object.entries(dropped ?? {}).map(([reason, n]) => `${whole(n)} ${reason}`);
  let kept = "Tokens are kept until a checkpoint covers their step, texts in the run's archive.";
  if (dropped) {
    kept = counts.length
      ? `Dropped so far: ${counts.join(", ")}. The newest of each are listed; their samples are deleted.`
      : "Nothing has been dropped.";
  }
  if (found.total) return `${whole(found.groups.length)} of ${whole(found.total)} groups. ${kept}`;
  return dropped ? kept : `No group matches. ${kept}`;
}

function showReasons(reasons, visible) {
  const select = $("groups-reason");
  const before = select.value;
  $("groups-reason-label").hidden = !visible;
  const names = ["", ...reasons.sort()];
  if ([...select.options].map((o) => o.value).join("\n") === names.join("\n")) return;
  select.replaceChildren(...names.map((name) => option(name, name || "any reason")));
  select.value = names.includes(before) ? before : "";
}

async function choose(id) {
  chosen = id;
  groupsTable.mark((g) => g.group_id === chosen);
  try {
    showGroup(await ask(`groups/${encodeURIComponent(id)}`));
  } catch (error) {
    const text = error instanceof Refusal ? error.message : "No controller answers.";
    $("group").replaceChildren(make("p", "hint", text));
  }
  samples().catch(() => {});
  // On a narrow page the group stands below the list.
  const beside = $("group").offsetTop < $("groups-table").offsetTop + 100;
  if (!beside) $("group").scrollIntoView({ block: "start" });
}

function showGroup(g) {
  const head = make("header");
  const facts = [
    `reward ${fixed(g.reward_mean)} ± ${fixed(g.reward_std)}`,
    g.staleness !== null && `${plural(g.staleness, "step")} stale`,
    g.generate_s !== null && `generated in ${seconds(g.generate_s)}`,
    g.reward_s !== null && `scored in ${seconds(g.reward_s)}`,
    g.owner !== null && `by ${g.owner}`,
    g.dataset_row !== null && `row ${g.dataset_row}, epoch ${g.epoch}`,
  ].filter(Boolean);
  const label = make("label", "facts", "Shade ");
  const select = make("select");
  for (const [value, text] of Object.entries(SHADINGS))
    select.append(option(value, text, value === shading));
  select.addEventListener("change", () => {
    shading = select.value;
    showGroup(g);
  });
  label.append(select);
  head.append(
    make("h2", "", g.group_id),
    make("span", "facts", facts.map(unbroken).join("   ")),
    label,
  );
  const list = make("div", "completions");
  const kept = g.completions.map((c) => ({ ...c, tokens: c.tokens ?? [] }));
  list.append(...kept.map(completion));
  const prompt = make("pre", "prompt", g.prompt || NO_TEXT);
  prompt.tabIndex = 0;
  prompt.setAttribute("aria-label", "Prompt");
  $("group").replaceChildren(head, prompt, list);
}

function completion(c, n) {
  const box = make("section", "completion");
  const title = make("h3");
  const look = c.relative_reward > 0 ? "good" : c.relative_reward < 0 ? "bad" : "";
  const branch = (c.branch_of ?? null) !== null;
  const name = `Completion ${n + 1}`;
  title.append(
    make("span", "", branch ? `${name}, a branch of ${c.branch_of + 1}` : name),
    make("span", look, `reward ${number(c.reward)}`),
  );
  const edges = versionEdges(c);
  const shade = (element, i) => {
    element.className = shadeOf(c, i) + (edges.has(i) ? " bound-left" : "");
    const edge = edges.has(i) ? `, from here on version ${edges.get(i)}` : "";
    element.title = `token ${c.tokens[i]}, log-prob ${c.logprobs[i].toFixed(2)}${edge}`;
    return element;
  };
  const text = make("pre");
  box.append(title, make("p", "parts", partsText(c)), text);
  const chars = [...c.text];
  if (oneTokenAChar(c, chars)) {
    text.append(...chars.map((ch, i) => shade(make("span", "", ch), i)));
    return box;
  }
  text.textContent = c.text || NO_TEXT;
  if (shading !== "none" && c.tokens.length) box.append(...tokenStrip(c, shade));
  return box;
}

// Then the text itself is shaded, else a strip below it. The text's end may have a token of its own.
function oneTokenAChar(c, chars) {
  const tokens = c.tokens.length;
  if (!tokens || !chars.length || chars.length > MOST_TOKENS) return false;
  return chars.length === tokens || chars.length + 1 === tokens;
}

// Index of a token -> the version that made it and those after it.
function versionEdges(c) {
  const edges = new Map();
  let at = 0;
  c.versions.forEach(([version, length], i) => {
    if (i) edges.set(at, version);
    at += length;
  });
  return edges;
}

function partsText(c) {
  const versions = c.versions.map(([version]) => version);
  const relative = `${c.relative_reward >= 0 ? "+" : "−"}${Math.abs(c.relative_reward).toFixed(2)}`;
  return [
    ...Object.entries(c.reward_components).map(([name, v]) => `${name} ${number(v)}`),
    unbroken(`relative reward ${relative}`),
    c.shared_tokens && unbroken(`after ${whole(c.shared_tokens)} shared tokens`),
    unbroken(`${whole(c.token_count)} tokens`),
    c.finish_reason,
    versions.length > 1
      ? `versions\u00a0${versions.join(" → ")}`
      : `version\u00a0${versions[0] ?? "?"}`,
  ]
    .filter(Boolean)
    .join("   ");
}

function shadeOf(c, i) {
  if (shading === "relative")
    return c.relative_reward > 0 ? "p1" : c.relative_reward < 0 ? "n1" : "";
  const logprob = c.logprobs[i];
  if (shading !== "logprob" || logprob >= -0.1) return "";
  if (logprob < -4) return "h4";
  if (logprob < -2) return "h3";
  return logprob < -0.7 ? "h2" : "h1";
}

function tokenStrip(c, shade) {
  const strip = make("div", "tokens");
  strip.setAttribute("role", "img");
  strip.setAttribute("aria-label", `Log-probabilities of ${c.tokens.length} tokens`);
  const bars = c.tokens.slice(0, MOST_TOKENS).map((_, i) => shade(make("i"), i));
  strip.append(...bars);
  const words =
    "A token is not a character here: each has a bar of its own, in their order, below the text.";
  return [make("p", "hint", words), strip];
}

$("groups-form").addEventListener("submit", (e) => e.preventDefault());
