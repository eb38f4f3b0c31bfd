// The banner on every view: what the run waits for, whose fault it is, what comes next, and the remedy.

import { askLeader } from "../api.js";
import { $, put } from "../dom.js";

export async function watchWhy() {
  const found = await askLeader("why");
  const banner = $("why");
  banner.hidden = found.severity === "ok";
  banner.className = found.severity === "stuck" ? "alert" : "alert slow";
  const remedy = found.remedy ? ` ${found.remedy}.` : "";
  if (!banner.hidden) put(banner, `${found.sentence}.${remedy}`);
}
