// Queue, leases, decisions and prefixes.

import { byId, el, percent, seconds, table, whole } from "./dom.js";

const MAX_DECISIONS = 150;
const TERMS = [
  ["prefill_ms", "prefill"], ["load_ms", "load from host"], ["queue_ms", "queue"],
  ["blocks_ms", "wait for blocks"], ["batch_ms", "crowded batch"], ["affinity_ms", "cached elsewhere"],
  ["total_ms", "total"],
];

const tenantOf = (row) => row.tenant || "(none)";
const nameOf = (row) => row.request_id || row.request_key || "(earlier controller)";
const number = (title, value) => ({ title, value, number: true });

export function showQueue(update) {
  const { waiting, state } = update;
  byId("queue-note").textContent = state.queued_requests
    ? `${whole(state.queued_requests)} requests, ${whole(state.queued_tokens)} tokens, oldest ${seconds(state.oldest_wait_s)}`
    : "";
  byId("queue-table").replaceChildren(waiting.length
    ? table(shown(waiting.length, state.queued_requests, "oldest first"), [
      { title: "request", value: nameOf },
      { title: "tenant", value: tenantOf },
      { title: "class", value: (row) => row.admission_class },
      number("tokens", (row) => whole(row.num_tokens)),
      number("blocks", (row) => whole(row.num_blocks)),
      number("waited", (row) => seconds(row.waited_s)),
    ], waiting)
    : el("p", { class: "empty" }, "Nobody waits."));
}

export function showLeases(update) {
  const { leases, num_leases: all } = update;
  byId("leases-note").textContent = all ? `${whole(all)} not ended` : "";
  byId("lease-table").replaceChildren(leases.length
    ? table(shown(leases.length, all, "newest first"), [
      { title: "request", value: nameOf },
      { title: "tenant", value: tenantOf },
      { title: "replica", value: (row) => row.replica_id },
      { title: "class", value: (row) => row.admission_class },
      number("may take", (row) => `${whole(row.remaining_blocks)} of ${whole(row.num_blocks)}`),
      number("age", (row) => seconds(row.age_s)),
      { title: "", value: (row) => (row.accepted ? "" : "on its way") },
    ], leases)
    : el("p", { class: "empty" }, "No leases."));
}

const shown = (count, all, order) => (count < all ? `${count} of ${whole(all)}, ${order}` : order);

export class Decisions {
  constructor() {
    this.list = byId("decision-list");
    this.last = 0;
  }

  /** New ones come first; those already there stay as they are, open or not. */
  update(update) {
    const { decisions, state } = update;
    if (decisions.length && decisions.at(-1).number < this.last) this.list.replaceChildren();
    if (decisions.length) this.last = decisions.at(-1).number;
    this.list.prepend(...decisions.map((decision) => this.item(decision)).reverse());
    while (this.list.children.length > MAX_DECISIONS) this.list.lastElementChild.remove();
    byId("decisions-note").textContent =
      `policy ${state.policy}: ${whole(state.granted)} granted, ${whole(state.refused)} refused, ${whole(state.expired)} expired`;
  }

  item(decision) {
    const row = [
      el("span", { class: "kind", data: { kind: decision.decision } }, decision.decision),
      el("span", { class: "mono", title: `${nameOf(decision)} (${decision.request_key})` }, nameOf(decision)),
      el("span", { title: tenantOf(decision) }, tenantOf(decision)),
      this.hits(decision),
      el("span", { title: decision.replica_id }, decision.replica_id || "–"),
      el("span", { class: "dim", title: "time waited in the queue" }, decision.waited_s ? seconds(decision.waited_s) : ""),
    ];
    const reason = el("p", { class: "reason" }, this.reason(decision));
    if (!decision.replicas.length) return el("li", { value: decision.number }, el("div", { class: "row" }, ...row), reason);
    const details = el("details", {}, el("summary", {}, ...row), this.costs(decision));
    return el("li", { value: decision.number }, details, reason);
  }

  hits(decision) {
    if (decision.decision !== "grant") {
      return el("span", { class: "dim" }, `${whole(decision.num_tokens)} tokens`);
    }
    const bar = el("span", {});
    bar.style.width = `${(100 * decision.hit_tokens) / Math.max(decision.num_tokens, 1)}%`;
    const text = `${percent(decision.hit_tokens, decision.num_tokens)} of ${whole(decision.num_tokens)}`;
    const title = `${whole(decision.hit_tokens)} of ${whole(decision.num_tokens)} prompt tokens found cached`;
    return el("span", { class: "hits", title }, el("span", { class: "meter", "aria-hidden": "true" }, bar), text);
  }

  reason(decision) {
    const blocks = decision.lease_blocks ? `, ${whole(decision.lease_blocks)} blocks` : "";
    const [chosen, other] = decision.replicas;
    const margin = chosen && other && decision.replica_id === chosen.replica_id
      ? `; ${chosen.total_ms.toFixed(1)} ms against ${other.total_ms.toFixed(1)} ms on ${other.replica_id}`
      : "";
    return `${decision.reason}${blocks}${margin}`;
  }

  costs(decision) {
    const columns = [
      { title: "ms when it asked", value: ([, title]) => title },
      ...decision.replicas.map((replica) => number(replica.replica_id, ([field]) => replica[field].toFixed(1))),
    ];
    const chosen = decision.replica_id ? "The chosen replica, and the best other one" : "The best replica";
    return el("div", { class: "costs" }, table(chosen, columns, TERMS));
  }
}

export function showPrefixes(prefixes) {
  const most = Math.max(1, ...prefixes.map((node) => node.num_requests));
  const groups = new Map(); // "tenant / model" → list
  const lists = [];
  const hasModels = new Set(prefixes.map((node) => node.model)).size > 1;
  prefixes.forEach((node, place) => {
    const item = el("li", {}, prefixNode(node, most));
    if (node.parent === null) {
      const name = tenantOf(node) + (hasModels ? ` · ${node.model}` : "");
      if (!groups.has(name)) groups.set(name, el("ul", {}));
      groups.get(name).append(item);
    } else {
      lists[node.parent].list ??= lists[node.parent].item.appendChild(el("ul", {}));
      lists[node.parent].list.append(item);
    }
    lists[place] = { item, list: null };
  });
  const parts = [...groups].sort().flatMap(([name, list]) => [el("h3", {}, name), list]);
  byId("prefix-trees").replaceChildren(...(parts.length ? parts : [el("p", { class: "empty" }, "No requests yet.")]));
}

function prefixNode(node, most) {
  const bar = el("span", { class: "bar", "aria-hidden": "true" });
  bar.style.width = `${Math.max(3, (150 * node.num_requests) / most)}px`;
  bar.dataset.where = node.num_device_replicas ? "device" : node.num_host_replicas ? "host" : "nowhere";
  const places = [];
  if (node.num_device_replicas) places.push(`on ${replicas(node.num_device_replicas)}`);
  if (node.num_host_replicas) places.push(`host memory of ${replicas(node.num_host_replicas)}`);
  return el("span", { class: "node" }, bar,
    el("span", {}, `${whole(node.num_tokens)} tokens`),
    el("span", {}, `${whole(node.num_requests)} ${node.num_requests === 1 ? "request" : "requests"}`),
    el("span", { class: "dim place" }, places.join(", ") || "nowhere now"),
    el("span", { class: "mono dim", title: "begin of its route hash" }, node.label));
}

const replicas = (count) => (count === 1 ? "1 replica" : `${count} replicas`);
