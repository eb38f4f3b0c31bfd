// The view "Settings": the configuration with which the answering controller was started.

import { ask } from "../api.js";
import { $ } from "../dom.js";
import { Table } from "../table.js";

const table = new Table(
  $("settings-table"),
  [
    { title: "setting", head: true, value: (s) => s.name },
    { title: "value", value: (s) => s.value },
  ],
  (s) => s.name,
  "Settings of the run",
);

const text = (value) => (value === null ? "none" : JSON.stringify(value));

// Sections may hold sections: each setting has its dotted name.
const flat = (name, value) =>
  value !== null && typeof value === "object" && !Array.isArray(value) && Object.keys(value).length
    ? Object.entries(value).flatMap(([field, inner]) => flat(`${name}.${field}`, inner))
    : [{ name, value: text(value) }];

export async function settings() {
  const config = await ask("config");
  const filter = $("settings-filter").value.trim().toLowerCase();
  const rows = Object.entries(config).flatMap(([section, fields]) => flat(section, fields));
  table.show(rows.filter((s) => `${s.name} ${s.value}`.toLowerCase().includes(filter)));
}
