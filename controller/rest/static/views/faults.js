// Faults of the run, in the view "Fleet": their causes, their hosts, and the training time that they cost.

import { askStandby } from "../api.js";
import { $, make, put } from "../dom.js";
import { seconds } from "../format.js";
import { Table } from "../table.js";

const MOST_HOSTS = 8;
const words = (cause) => cause.replaceAll("_", " ");

const table = new Table(
  $("faults-table"),
  [
    { title: "when", head: true, node: (f) => when(f.t) },
    { title: "process", value: (f) => f.name },
    { title: "cause", value: (f) => words(f.cause), class: (f) => (f.attributed ? "" : "warn") },
    { title: "host", value: (f) => f.host || "–" },
    { title: "pid", num: true, value: (f) => (f.pid ? String(f.pid) : "–") },
    { title: "training lost", num: true, value: (f) => seconds(f.lost_s) },
    {
      title: "usual pace again after",
      num: true,
      value: (f) => (f.recovered_s === null ? "not yet" : seconds(f.recovered_s)),
    },
  ],
  (f) => `${f.t} ${f.name} ${f.pid}`,
  "Faults",
);

function when(t) {
  const at = new Date(t * 1000);
  const today = at.toDateString() === new Date().toDateString();
  const time = make(
    "time",
    "",
    today ? at.toLocaleTimeString("en-GB") : at.toLocaleString("en-GB"),
  );
  time.dateTime = at.toISOString();
  return time;
}

export async function faults() {
  const found = await askStandby("faults");
  $("faults").hidden = !found.faults;
  put($("faults-sentence"), found.sentence ? `${found.sentence}.` : "");
  const hosts = Object.entries(found.hosts).sort((a, b) => b[1] - a[1]);
  const shown = hosts
    .slice(0, MOST_HOSTS)
    .map(([host, count]) => `${host || "not known"} ${count}`);
  const more = hosts.length > MOST_HOSTS ? `, and ${hosts.length - MOST_HOSTS} hosts more` : "";
  put($("faults-hosts"), `by host: ${shown.join(", ")}${more}`);
  table.show(found.recent.toReversed());
}
