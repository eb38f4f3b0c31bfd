// Tables whose rows keep their elements. Of many rows only those in sight are in the document;
// empty bodies above and below take the room of the others.

import { make, put } from "./dom.js";

const MANY = 150;
const ROW_PX = 31;

export class Table {
  // columns: [{ title, num, head, value(row) -> text, class(row), node(row) }]
  constructor(table, columns, key, caption) {
    this.table = table;
    this.columns = columns;
    this.key = key;
    this.rows = new Map();
    this.data = [];
    this.onRow = null;
    table.append(make("caption", "unseen", caption));
    const head = make("tr");
    for (const c of columns) {
      const th = make("th", c.num ? "num" : "", c.title);
      th.scope = "col";
      head.append(th);
    }
    const thead = make("thead");
    thead.append(head);
    this.body = make("tbody");
    this.above = this.room();
    this.below = this.room();
    table.append(thead, this.above, this.body, this.below);
    this.box = table.parentElement;
    const onScroll = () => {
      if (this.data.length > MANY) requestAnimationFrame(() => this.render());
    };
    this.box.addEventListener("scroll", onScroll, { passive: true });
  }

  room() {
    const room = make("tbody");
    const row = make("tr");
    const cell = make("td");
    cell.colSpan = this.columns.length;
    row.append(cell);
    room.append(row);
    room.setAttribute("aria-hidden", "true");
    room.hidden = true;
    return room;
  }

  show(rows, onRow) {
    this.data = rows;
    this.onRow = onRow;
    this.render();
  }

  // Selects the rows for which `chosen(row)` is true, without new data.
  mark(chosen) {
    this.onRow = (tr, row) => tr.setAttribute("aria-selected", String(chosen(row)));
    this.render();
  }

  render() {
    const many = this.data.length > MANY;
    const [first, last] = many ? this.inSight() : [0, this.data.length];
    this.table.classList.toggle("many", many);
    if (many) this.table.setAttribute("aria-rowcount", String(this.data.length + 1));
    else this.table.removeAttribute("aria-rowcount");
    resize(this.above, first);
    resize(this.below, this.data.length - last);
    const seen = new Set();
    let previous = null;
    for (let at = first; at < last; at++) {
      const row = this.data[at];
      const key = this.key(row);
      seen.add(key);
      let tr = this.rows.get(key);
      if (!tr) {
        tr = this.make(row);
        this.rows.set(key, tr);
      }
      if (many) tr.setAttribute("aria-rowindex", String(at + 2));
      else tr.removeAttribute("aria-rowindex");
      this.fill(tr, row);
      const place = previous ? previous.nextSibling : this.body.firstChild;
      if (place !== tr) this.body.insertBefore(tr, place);
      previous = tr;
    }
    for (const [key, tr] of this.rows) {
      if (seen.has(key)) continue;
      tr.remove();
      this.rows.delete(key);
    }
  }

  inSight() {
    const top = Math.max(0, Math.floor(this.box.scrollTop / ROW_PX) - 15);
    const first = Math.min(top, this.data.length - 1);
    const count = Math.ceil(this.box.clientHeight / ROW_PX) + 30;
    return [first, Math.min(this.data.length, first + count)];
  }

  make(row) {
    const tr = make("tr");
    for (const c of this.columns) {
      const cell = make(c.head ? "th" : "td", c.num ? "num" : "");
      if (c.head) cell.scope = "row";
      if (c.node) cell.append(c.node(row));
      tr.append(cell);
    }
    return tr;
  }

  fill(tr, row) {
    this.columns.forEach((c, i) => {
      const cell = tr.cells[i];
      if (c.value) put(cell, c.value(row));
      const look = c.class ? c.class(row) : cell.className;
      if (cell.className !== look) cell.className = look;
    });
    if (this.onRow) this.onRow(tr, row);
  }
}

function resize(room, rows) {
  room.hidden = !rows;
  room.firstChild.firstChild.style.height = `${rows * ROW_PX}px`;
}
