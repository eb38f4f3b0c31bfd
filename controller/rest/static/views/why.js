// The banner on every view: what the run waits for, whose fault it is, what comes next, and the remedy.

import { askLeader } from "../api.js";
import { $, put } from "../dom.js";
import { state } from "../state.js";

export async function watchWhy() {
  const found = await askLeader("why");
  const banner = $("why");
  state.trouble = found.severity !== "ok";
  // How a run ended is in its header.
  banner.hidden = !state.trouble;
  banner.className = found.severity === "stuck" ? "alert" : "alert slow";
  const remedy = found.remedy ? ` ${found.remedy}.` : "";
  const sentence = found.sentence.charAt(0).toUpperCase() + found.sentence.slice(1);
  if (!banner.hidden) put(banner, `${sentence}.${remedy}`);
}
