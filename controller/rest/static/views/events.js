// The view "Events": what happened, newest first; and notices of new faults on every view.

import { askStandby } from "../api.js";
import { notify } from "../dialog.js";
import { $, make } from "../dom.js";
import { seconds } from "../format.js";
import { state } from "../state.js";

export const isFault = (e) => e.severity === "warning" || e.severity === "error";

export function eventItem(e) {
  const item = make("li", e.severity);
  const at = new Date(e.t * 1000);
  const time = make("time", "", at.toLocaleTimeString("en-GB"));
  time.dateTime = at.toISOString();
  time.title = at.toLocaleString("en-GB");
  // Runs take days.
  if (at.toDateString() !== new Date().toDateString())
    time.prepend(`${at.toLocaleDateString("en-GB", { day: "numeric", month: "short" })} `);
  item.append(time);
  if (isFault(e)) item.append(make("span", "sev", "fault"));
  item.append(make("span", "what", e.text));
  const more = [];
  if (e.commit_s !== null) more.push(`The next step was committed ${seconds(e.commit_s)} later.`);
  if (more.length) item.append(make("p", "more", more.join(" ")));
  return item;
}

let shownMark = "";
export async function events() {
  const found = await askStandby(`events?kind=${$("events-kind").value}&limit=300`);
  const filter = $("events-filter").value.trim().toLowerCase();
  const matches = (e) => !filter || e.text.toLowerCase().includes(filter);
  const shown = found.events.filter(matches).reverse();
  const mark = JSON.stringify(shown.map((e) => [e.id, e.commit_s]));
  if (mark === shownMark) return;
  shownMark = mark;
  $("events-list").replaceChildren(...shown.map(eventItem));
}

let last; // id of the newest fault that was read; null: there is none yet
let open = false; // it was shown, and no step had been committed since
export async function watchFaults() {
  const found = await askStandby("events?kind=faults&limit=1&newest=true");
  const fault = found.events.at(-1);
  const before = last;
  last = fault?.id ?? null;
  // Those from before the page was opened are no news.
  if (!fault || before === undefined || (before === last && !open)) return;
  const over = fault.commit_s !== null;
  if (before === last && !over) return;
  const recovered = state.trouble ? "Training goes on" : "Recovered";
  const after = `. ${recovered}: the next step was committed ${seconds(fault.commit_s)} later.`;
  notify(fault.text + (over ? after : ""), !over);
  open = !over;
  state.drawnStep = -1;
}
