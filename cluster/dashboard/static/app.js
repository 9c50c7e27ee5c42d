// The page: asks for a key where one is needed, follows the stream, hands updates to the parts.
// Reads only. Follows nothing while it is hidden or paused.

import { Charts } from "./charts.js";
import { byId, el, percent, seconds, short, whole } from "./dom.js";
import { Decisions, showLeases, showPrefixes, showQueue } from "./lists.js";
import { Pools } from "./pools.js";

const KEY = "pagefleet-key"; // in this tab's memory only
const THEME = "pagefleet-theme";
const THEMES = ["auto", "dark", "light"];
const RETRY_MS = [500, 1000, 2000, 5000];

const parts = { charts: new Charts(), pools: new Pools(), decisions: new Decisions() };
let stream = null; // AbortController of the one that runs
let isPaused = false;
let numFailures = 0;
let retryTimer = 0;

// -- the stream --------------------------------------------------------------------------------

async function follow() {
  clearTimeout(retryTimer);
  stream?.abort();
  if (isPaused || document.hidden) return;
  const mine = (stream = new AbortController());
  try {
    const key = sessionStorage.getItem(KEY);
    const headers = key ? { authorization: `Bearer ${key}` } : {};
    const response = await fetch("dashboard/stream?period=1", { headers, cache: "no-store", signal: mine.signal });
    if (response.status === 401 || response.status === 403) return askForKey(key ? await problemOf(response) : "");
    if (!response.ok) throw new Error(await problemOf(response));
    await readEvents(response.body, take);
    throw new Error("the stream ended");
  } catch (error) {
    if (mine.signal.aborted) return;
    tell("away", `away: ${error.message}`);
    retryTimer = setTimeout(follow, RETRY_MS[Math.min(numFailures, RETRY_MS.length - 1)]);
    numFailures += 1;
  }
}

async function problemOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `status ${response.status}`;
  }
}

async function readEvents(body, take) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) if (event.startsWith("data: ")) take(JSON.parse(event.slice(6)));
  }
}

function take(update) {
  if (update.error) throw new Error(update.error.message);
  numFailures = 0;
  tell("live", "live");
  summarize(update);
  parts.charts.update(update);
  parts.pools.update(update.state, update.pools);
  parts.decisions.update(update);
  showQueue(update);
  showLeases(update);
  showPrefixes(update.prefixes);
  document.body.dataset.updates = Number(document.body.dataset.updates ?? 0) + 1;
}

function tell(state, text) {
  const pill = byId("connection");
  if (pill.textContent !== text) pill.textContent = text;
  pill.dataset.state = state;
}

function summarize(update) {
  const { state, rates } = update;
  const blocks = (field) => state.replicas.reduce((sum, replica) => sum + replica.device[field], 0);
  const used = blocks("referenced") + blocks("fenced");
  const all = used + blocks("clean") + blocks("cached_idle");
  const ready = state.replicas.filter((replica) => replica.state === "ready").length;
  const running = state.replicas.reduce((sum, replica) => sum + replica.num_running, 0);
  const values = [
    ["replicas", `${ready} of ${state.replicas.length} ready`],
    ["blocks in use", `${percent(used, all)} of ${short(all)}`],
    ["running", whole(running)],
    ["queued", whole(state.queued_requests)],
    ["requests/s", rates.requests_per_s.toFixed(1)],
    ["up", seconds(state.uptime_s)],
  ];
  byId("summary").replaceChildren(...values.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

// -- key, pause, theme -------------------------------------------------------------------------

function askForKey(problem) {
  sessionStorage.removeItem(KEY);
  byId("forget").hidden = false;
  byId("forget").textContent = "Give key";
  tell("away", "needs a key");
  byId("key-problem").textContent = problem;
  byId("key").value = "";
  if (!byId("key-dialog").open) byId("key-dialog").showModal();
  byId("key").focus();
}

byId("key-form").addEventListener("submit", () => {
  sessionStorage.setItem(KEY, byId("key").value.trim());
  byId("key").value = "";
  byId("key-problem").textContent = "";
  byId("forget").textContent = "Forget key";
  tell("", "connecting");
  follow();
});

byId("forget").hidden = sessionStorage.getItem(KEY) === null;
byId("forget").addEventListener("click", () => {
  stream?.abort();
  askForKey("");
});

byId("pause").addEventListener("click", () => {
  isPaused = !isPaused;
  byId("pause").setAttribute("aria-pressed", String(isPaused));
  if (isPaused) tell("paused", "paused");
  follow();
});

document.addEventListener("visibilitychange", follow);

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = `Theme: ${theme}`;
  parts.pools.retheme();
  parts.charts.draw();
}

byId("theme").addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
  localStorage.setItem(THEME, next);
  setTheme(next);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme(document.documentElement.dataset.theme));

const stored = localStorage.getItem(THEME);
setTheme(THEMES.includes(stored) ? stored : "auto");
follow();
