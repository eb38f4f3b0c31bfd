// REST client: reads from any controller, fails over to the next, and sends commands to the leader.

import { hmac, sha256 } from "./sha256.js";
import { state } from "./state.js";

const READ_TIMEOUT_MS = 4000;
const COMMAND_TIMEOUT_MS = 12000;
const MOST_CONTROLLERS = 16;
const TRY_AGAIN_MS = 10000;
const RELOAD_AT_MOST_EVERY_MS = 10000;
const LOOPBACK = ["localhost", "127.0.0.1", "[::1]"];

let bases = [location.origin]; // controllers' URLs
let current = 0; // index in bases of the one that answered last
const reached = new Map(); // URL -> whether this page may talk to that controller

// An answer that says no, as opposed to no answer.
export class Refusal extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

// In this page's memory alone: what an origin stores, the next process that listens on its port can
// read. After a reload the user is asked again.
let kept = "";
let proving = false; // once the page had a token, it believes no answer without a proof
export const storedToken = () => kept;
export const storeToken = (token) => {
  kept = token;
  proving ||= Boolean(token);
};
export const forgetToken = () => storeToken("");

const hex = (bytes) => [...bytes].map((b) => b.toString(16).padStart(2, "0")).join("");

// Proves that this page has the token, without sending it: paceline/rpc/request_proof.py. Whoever
// took the port of a controller that died gets a proof of this one request, and can prove no answer.
const bytes = (text) => new TextEncoder().encode(text);
const mac = (token, ...lines) => hex(hmac(bytes(token), bytes(lines.join("\n"))));

function proof(token, nonce, method, path, body) {
  const signed = [Date.now(), nonce, hex(sha256(bytes(body || "")))];
  return `Paceline ${[...signed, mac(token, method, path, ...signed)].join(".")}`;
}

async function proven(response, token, nonce) {
  const body = new Uint8Array(await response.arrayBuffer());
  const wanted = mac(token, "answer", nonce, response.status, hex(sha256(body)));
  if (response.status !== 401 && response.headers.get("paceline-proof") !== wanted)
    throw new Error("a stranger may have taken the port of a controller");
  return JSON.parse(new TextDecoder().decode(body));
}

// Asks the user for the token; set by the dialog, which needs this module.
let askToken = async () => false;
export function onTokenNeeded(handler) {
  askToken = handler;
}

export async function request(base, path, { method = "GET", body, token } = {}) {
  const write = method !== "GET";
  const headers = { Accept: "application/json" };
  const target = new URL(`${base}/api/v1/${path}`);
  const secret = token ?? storedToken();
  const nonce = hex(crypto.getRandomValues(new Uint8Array(16)));
  if (secret)
    headers.Authorization = proof(secret, nonce, method, target.pathname + target.search, body);
  if (body) headers["Content-Type"] = "application/json";
  const stop = new AbortController();
  const timer = setTimeout(() => stop.abort(), write ? COMMAND_TIMEOUT_MS : READ_TIMEOUT_MS);
  let response;
  let answer;
  try {
    response = await fetch(target, {
      method,
      headers,
      body,
      signal: stop.signal,
      credentials: "omit",
      redirect: write ? "manual" : "follow",
      cache: "no-store",
    });
    if (response.type === "opaqueredirect")
      throw new Refusal(307, "another controller leads by now: try again");
    answer = await (secret ? proven(response, secret, nonce) : response.json());
  } finally {
    clearTimeout(timer);
  }
  if (!response.ok)
    throw new Refusal(
      response.status,
      answer.detail || `the controller answered ${response.status}`,
    );
  return answer;
}

// Reads go to the controller that answered last; if it is silent or refuses, to the next one:
// whoever took the port of a controller that died may refuse as well.
export async function ask(path) {
  if (proving && !storedToken()) {
    await askToken();
    if (!storedToken()) throw new Refusal(401, "this page needs the run's token again");
  }
  const token = storedToken();
  let error = null;
  for (let n = 0; n < bases.length; n++) {
    try {
      return await request(bases[current % bases.length], path, { token });
    } catch (e) {
      if (e instanceof Refusal || !error) error = e;
      current = (current + 1) % bases.length;
    }
  }
  if (error.status !== 401) throw error;
  if (token === storedToken()) forgetToken(); // else another one is stored by now
  if (!token) await askToken();
  throw error;
}

// Heartbeats and gauges are known to the leader alone. If it is out of reach, the answer is ours.
export async function askLeader(path) {
  const base = leaderBase();
  if (base && base !== bases[current] && reached.get(base)) {
    try {
      return await request(base, path);
    } catch {
      // It may have died just now.
    }
  }
  return ask(path);
}

// What a standby knows as well, the leader is not asked: it decides for the fleet meanwhile.
export async function askStandby(path) {
  const leader = leaderBase();
  const base = bases.find((b) => b !== leader && b !== bases[current] && reached.get(b));
  if (base && answeredByLeader()) {
    try {
      return await request(base, path);
    } catch {
      // It may have died just now.
    }
  }
  return ask(path);
}

export const askCurrent = (path, token) => request(bases[current], path, { token });

export function command(path, body, token) {
  const options = { method: "POST", body: JSON.stringify(body), token };
  return request(leaderBase() ?? bases[current], path, options);
}

export const answeredByLeader = () => leaderBase() === bases[current];

function leaderBase() {
  const { run } = state;
  const leader = run?.controllers.find((c) => c.controller_id === run.leader && c.rest);
  return leader ? aliased(leader.rest) : null;
}

// A page opened as localhost stays so: to the browser another loopback name is another site.
function aliased(url) {
  const at = new URL(url);
  const same = at.port === location.port && at.protocol === location.protocol;
  const loopback = LOOPBACK.includes(at.hostname) && LOOPBACK.includes(location.hostname);
  return same && loopback ? location.origin : url;
}

// Takes over the controllers that a run's status names; returns how many others are in reach.
export function learnControllers(controllers) {
  const alive = controllers.filter((c) => c.rest && c.state !== "silent");
  const others = alive.map((c) => aliased(c.rest));
  bases = [...new Set([bases[current], ...others, ...bases])].slice(0, MOST_CONTROLLERS);
  current = 0;
  for (const base of others) tryReach(base);
  return others.filter((base) => base !== bases[0] && reached.get(base)).length;
}

// Another controller is tried while the page's own is alive: the page's policy names those known
// when it was loaded. One that came later violates the policy, and the page loads anew: over HTTPS
// alone, because a stranger may have this page's port by now.
async function tryReach(base) {
  if (reached.has(base)) return;
  reached.set(base, base === location.origin);
  try {
    await fetch(`${base}/healthz`, { credentials: "omit", cache: "no-store" });
    reached.set(base, true);
  } catch {
    setTimeout(() => reached.delete(base), TRY_AGAIN_MS);
  }
}

document.addEventListener("securitypolicyviolation", (e) => {
  const last = Number(sessionStorage.getItem("paceline-reloaded") || 0);
  const busy = document.querySelector("dialog[open]") || state.failures;
  const proven = location.protocol === "https:";
  if (e.effectiveDirective !== "connect-src" || busy || !proven) return;
  if (Date.now() - last < RELOAD_AT_MOST_EVERY_MS) return;
  sessionStorage.setItem("paceline-reloaded", String(Date.now()));
  location.reload();
});
