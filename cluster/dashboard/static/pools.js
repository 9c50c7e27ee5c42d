// The maps of all pools: a canvas per tier of a replica, a legend that isolates a state, a cursor
// for the keyboard, and the same as a table.

import { STATES, blocksOf, decodeCells, drawCell, layout, levelOf, palette, runs, share, stateOf } from "./cells.js";
import { byId, el, percent, shade, short, sized, table, whole } from "./dom.js";

const MAX_RUNS = 400;
const DENSE_FROM = 24; // more replicas than this get small maps

export class Pools {
  constructor() {
    this.maps = new Map(); // "replica/tier" → {replica, tier, numBlocks, cells, canvas}
    this.cards = new Map(); // replica → its card
    this.replicas = [];
    this.lone = null; // the state shown alone
    this.cursor = null; // {key, index}
    this.isTable = false;
    this.shownRuns = null; // key of the pool whose runs are listed
    this.colours = palette(shade);
    this.box = byId("pool-maps");
    this.makeLegend();
    byId("as-table").addEventListener("click", () => this.showTable(!this.isTable));
    new ResizeObserver(() => this.drawAll()).observe(this.box);
  }

  /** A new update of the stream. */
  update(state, pools) {
    this.replicas = state.replicas;
    const present = new Set(state.replicas.map((replica) => replica.replica_id));
    for (const [key, map] of this.maps) if (!present.has(map.replica)) this.maps.delete(key);
    const changed = new Set();
    for (const pool of pools) {
      const key = `${pool.replica_id}/${pool.tier}`;
      const known = this.maps.get(key) ?? { replica: pool.replica_id, tier: pool.tier, canvas: null };
      known.numBlocks = pool.map.num_blocks;
      known.cells = decodeCells(pool.map.cells);
      this.maps.set(key, known);
      changed.add(key);
    }
    const isSame = this.cards.size === present.size && [...this.cards.keys()].every((id) => present.has(id));
    if (!isSame || [...changed].some((key) => this.maps.get(key).canvas === null)) this.makeCards();
    else for (const key of changed) this.draw(key);
    for (const replica of state.replicas) this.describe(replica);
    this.countStates();
    if (this.isTable) this.fillTable();
    if (this.cursor && changed.has(this.cursor.key)) this.readOut(false);
  }

  retheme() {
    this.colours = palette(shade);
    this.drawAll();
    this.drawLegend();
  }

  // -- cards ----------------------------------------------------------------------------------

  makeCards() {
    const count = this.replicas.length;
    const focused = document.activeElement?.dataset?.key;
    this.box.style.setProperty("--card", count > DENSE_FROM ? "172px" : count > 6 ? "230px" : "300px");
    this.box.toggleAttribute("data-dense", count > DENSE_FROM);
    this.cards.clear();
    for (const map of this.maps.values()) map.canvas = null;
    const cards = this.replicas.map((replica) => {
      const id = replica.replica_id;
      const card = {
        badge: el("span", { class: "badge" }),
        line: el("p", { class: "pool-line" }),
      };
      const parts = [el("div", { class: "pool-head" }, el("h3", { title: id }, id), card.badge), card.line];
      for (const tier of ["device", "host"]) {
        const key = `${id}/${tier}`;
        const map = this.maps.get(key);
        if (!map) continue;
        if (tier === "host") parts.push(el("p", { class: "tier" }, "host tier"));
        map.canvas = this.makeCanvas(key);
        parts.push(map.canvas);
      }
      card.node = el("article", { class: "pool", "aria-label": id }, ...parts);
      this.cards.set(id, card);
      return card.node;
    });
    this.box.replaceChildren(...cards);
    if (this.cursor && !this.maps.has(this.cursor.key)) this.cursor = null;
    this.setTabStop(this.cursor?.key ?? this.keys()[0]);
    this.drawAll();
    if (focused && this.maps.get(focused)?.canvas) this.maps.get(focused).canvas.focus({ preventScroll: true });
  }

  makeCanvas(key) {
    const canvas = el("canvas", {
      role: "application", "aria-roledescription": "block map", tabindex: -1,
      "aria-describedby": "map-hint", data: { key },
    });
    canvas.addEventListener("keydown", (event) => this.onKey(event, key));
    canvas.addEventListener("focus", () => {
      if (this.cursor?.key !== key) this.cursor = { key, index: 0 };
      this.setTabStop(key);
      this.draw(key);
      this.readOut(true);
    });
    canvas.addEventListener("blur", () => this.draw(key));
    canvas.addEventListener("pointermove", (event) => this.onPoint(event, key));
    canvas.addEventListener("pointerleave", () => this.say(""));
    return canvas;
  }

  describe(replica) {
    const card = this.cards.get(replica.replica_id);
    if (!card) return;
    const device = replica.device;
    const total = device.clean + device.cached_idle + device.referenced + device.fenced;
    card.badge.textContent = replica.state;
    card.badge.dataset.state = replica.state;
    const used = percent(device.referenced + device.fenced, total);
    const waiting = replica.num_waiting ? ` · ${replica.num_waiting} waiting` : "";
    card.line.textContent = this.replicas.length > DENSE_FROM
      ? `${used} of ${short(total)} · ${replica.num_running} running`
      : `${short(total)} blocks · ${used} in use · ${replica.num_running} running${waiting}`;
    card.line.title = `${whole(total)} blocks, ${used} in use, ${replica.num_running} running${waiting}, ` +
      `${whole(replica.leased_blocks)} blocks leased, ${whole(replica.available_blocks)} available`;
    for (const tier of ["device", "host"]) {
      const map = this.maps.get(`${replica.replica_id}/${tier}`);
      map?.canvas?.setAttribute("aria-label", `${replica.replica_id}, ${tier}: ${summary(replica[tier])}`);
    }
  }

  // -- drawing --------------------------------------------------------------------------------

  drawAll() {
    for (const key of this.maps.keys()) this.draw(key);
  }

  draw(key) {
    const map = this.maps.get(key);
    if (!map?.canvas) return;
    const width = map.canvas.clientWidth;
    if (!width) return;
    const dense = this.replicas.length > DENSE_FROM;
    const tall = map.tier === "host" ? (dense ? 16 : 44) : dense ? 76 : this.replicas.length > 6 ? 130 : 190;
    const place = layout(map.cells.length, width, tall);
    map.layout = place;
    const height = place.rows * place.size;
    map.canvas.style.height = `${height}px`;
    const context = sized(map.canvas, width, height);
    for (let index = 0; index < map.cells.length; index += 1) {
      const x = (index % place.columns) * place.size;
      const y = Math.floor(index / place.columns) * place.size;
      drawCell(context, map.cells[index], x, y, place.size, this.colours, this.lone);
    }
    if (this.cursor?.key === key && document.activeElement === map.canvas) this.drawCursor(context, place);
  }

  drawCursor(context, { size, columns }) {
    const x = (this.cursor.index % columns) * size;
    const y = Math.floor(this.cursor.index / columns) * size;
    context.strokeStyle = this.colours.focus;
    context.lineWidth = 2;
    context.strokeRect(x, y, Math.max(size - 1, 4), Math.max(size - 1, 4));
  }

  // -- a cell at a time -----------------------------------------------------------------------

  keys() {
    return this.replicas.flatMap((replica) =>
      ["device", "host"].map((tier) => `${replica.replica_id}/${tier}`).filter((key) => this.maps.get(key)?.canvas));
  }

  setTabStop(key) {
    for (const [other, map] of this.maps) map.canvas?.setAttribute("tabindex", other === key ? "0" : "-1");
  }

  onKey(event, key) {
    const map = this.maps.get(key);
    const columns = map.layout?.columns ?? 1;
    const last = map.cells.length - 1;
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns };
    if (event.key in steps) {
      const next = this.cursor.index + steps[event.key];
      if (next >= 0 && next <= last) this.cursor.index = next;
    } else if (event.key === "Home") this.cursor.index = 0;
    else if (event.key === "End") this.cursor.index = last;
    else if (event.key === "PageDown" || event.key === "PageUp") {
      const keys = this.keys();
      const at = keys.indexOf(key) + (event.key === "PageDown" ? 1 : -1);
      if (at >= 0 && at < keys.length) this.maps.get(keys[at]).canvas.focus();
    } else return;
    event.preventDefault();
    this.draw(this.cursor.key);
    this.readOut(true);
  }

  onPoint(event, key) {
    const map = this.maps.get(key);
    if (!map.layout) return;
    const { size, columns } = map.layout;
    const column = Math.floor(event.offsetX / size);
    const index = Math.floor(event.offsetY / size) * columns + column;
    if (column < columns && index < map.cells.length) this.say(this.text(key, index));
  }

  text(key, index) {
    const map = this.maps.get(key);
    const [first, last] = blocksOf(index, map.cells.length, map.numBlocks);
    const state = STATES[stateOf(map.cells[index])];
    const where = first === last ? `block ${whole(first)}` : `blocks ${whole(first)} to ${whole(last)}`;
    const much = first === last ? "" : `${share(levelOf(map.cells[index]))} `;
    return `${map.replica} ${map.tier}, ${where}: ${much}${state.name} – ${state.meaning}`;
  }

  readOut(isMoved) {
    const map = this.maps.get(this.cursor.key);
    this.cursor.index = Math.min(this.cursor.index, Math.max(map.cells.length - 1, 0));
    if (map.cells.length && (isMoved || document.activeElement === map.canvas)) {
      this.say(this.text(this.cursor.key, this.cursor.index));
    }
  }

  say(text) {
    const readout = byId("cell");
    if (readout.textContent !== text) readout.textContent = text;
  }

  // -- legend ---------------------------------------------------------------------------------

  makeLegend() {
    this.legend = STATES.map((state, index) => {
      const swatch = el("canvas", { "aria-hidden": "true" });
      const count = el("span", { class: "count" });
      const button = el("button", { type: "button", "aria-pressed": "false", title: state.meaning },
        swatch, el("span", {}, state.name), count);
      button.addEventListener("click", () => {
        this.lone = this.lone === index ? null : index;
        this.legend.forEach((entry, i) => entry.button.setAttribute("aria-pressed", String(this.lone === i)));
        this.drawAll();
      });
      return { button, swatch, count };
    });
    byId("legend").replaceChildren(...this.legend.map((entry) => entry.button));
    this.drawLegend();
  }

  drawLegend() {
    this.legend.forEach((entry, index) => {
      drawCell(sized(entry.swatch, 14, 14), index | (31 << 3), 0, 0, 14, this.colours, null);
    });
  }

  countStates() {
    const sums = this.sums(this.maps.values());
    this.legend.forEach((entry, index) => {
      entry.count.textContent = short(sums[index]);
    });
  }

  /** About how many blocks of each state some maps show. */
  sums(maps) {
    const sums = STATES.map(() => 0);
    for (const map of maps) {
      for (let index = 0; index < map.cells.length; index += 1) {
        const [first, last] = blocksOf(index, map.cells.length, map.numBlocks);
        sums[stateOf(map.cells[index])] += ((last - first + 1) * levelOf(map.cells[index])) / 31;
      }
    }
    return sums;
  }

  // -- the same as a table --------------------------------------------------------------------

  showTable(isTable) {
    this.isTable = isTable;
    byId("as-table").setAttribute("aria-pressed", String(isTable));
    byId("pool-maps").hidden = isTable;
    byId("pool-table").hidden = !isTable;
    byId("pool-maps").style.display = isTable ? "none" : "";
    if (isTable) this.fillTable();
    else this.drawAll();
  }

  fillTable() {
    const focused = document.activeElement?.dataset?.runs;
    const rows = this.replicas.flatMap((replica) =>
      ["device", "host"].filter((tier) => total(replica[tier])).map((tier) => ({ replica, tier, counts: replica[tier] })));
    const number = (title, value) => ({ title, value, number: true });
    const summaryTable = table("Blocks by state, as each replica counts them", [
      { title: "pool", value: (row) => `${row.replica.replica_id} ${row.tier}` },
      { title: "replica is", value: (row) => row.replica.state },
      number("clean", (row) => whole(row.counts.clean)),
      number("cached", (row) => whole(row.counts.cached_idle)),
      number("referenced or shared", (row) => whole(row.counts.referenced)),
      number("of these shared, about", (row) => whole(this.sharedOf(row))),
      number("fenced", (row) => whole(row.counts.fenced)),
      number("total", (row) => whole(total(row.counts))),
      { title: "", value: (row) => this.runsButton(row) },
    ], rows);
    const parts = [summaryTable];
    const map = this.shownRuns && this.maps.get(this.shownRuns);
    if (map) parts.push(this.runsTable(map));
    byId("pool-table").replaceChildren(...parts);
    if (focused) byId("pool-table").querySelector(`[data-runs="${CSS.escape(focused)}"]`)?.focus();
  }

  sharedOf({ replica, tier }) {
    const map = this.maps.get(`${replica.replica_id}/${tier}`);
    return map ? this.sums([map])[3] : 0;
  }

  runsButton({ replica, tier }) {
    const key = `${replica.replica_id}/${tier}`;
    const isShown = this.shownRuns === key;
    return el("button", {
      type: "button", "aria-expanded": String(isShown), data: { runs: key },
      "aria-label": `blocks of ${replica.replica_id} ${tier}`,
      onclick: () => {
        this.shownRuns = isShown ? null : key;
        this.fillTable();
      },
    }, isShown ? "hide blocks" : "blocks");
  }

  runsTable(map) {
    const found = runs(map.cells, map.numBlocks);
    const more = found.length > MAX_RUNS ? `, the first ${MAX_RUNS} of ${found.length} runs` : "";
    return table(`${map.replica} ${map.tier}: runs of blocks${more}`, [
      { title: "blocks", value: (run) => `${whole(run.first)} to ${whole(run.last)}` },
      { title: "mostly", value: (run) => STATES[run.state].name },
      { title: "how many of them", value: (run) => share(run.level), number: true },
    ], found.slice(0, MAX_RUNS));
  }
}

const total = (counts) => counts.clean + counts.cached_idle + counts.referenced + counts.fenced;

const summary = (counts) =>
  `${whole(total(counts))} blocks, ${whole(counts.clean)} clean, ${whole(counts.cached_idle)} cached, ` +
  `${whole(counts.referenced)} referenced or shared, ${whole(counts.fenced)} fenced`;
