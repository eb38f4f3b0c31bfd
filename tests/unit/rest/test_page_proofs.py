"""The page's own SHA-256, by which it proves that it has the token; and what it loads anew."""

import hashlib
import hmac
import json
import shutil
import subprocess
from pathlib import Path

import pytest

STATIC = Path(__file__).parents[3] / "controller" / "rest" / "static"
SCRIPT = """
const { sha256, hmac } = await import(process.argv[1]);
const text = (t) => new TextEncoder().encode(t);
const hex = (b) => Buffer.from(b).toString("hex");
const cases = JSON.parse(await new Promise((done) => {
  let all = ""; process.stdin.on("data", (d) => { all += d; }).on("end", () => done(all));
}));
const found = cases.map(([k, m]) => [hex(sha256(text(m))), hex(hmac(text(k), text(m)))]);
console.log(JSON.stringify(found));
"""


VIOLATED = """
let heard, loaded = 0;
globalThis.location = { protocol: process.argv[2], reload: () => { loaded += 1; } };
globalThis.document = { addEventListener: (_, f) => { heard = f; }, querySelector: () => null };
globalThis.sessionStorage = { getItem: () => null, setItem: () => null };
await import(process.argv[1]);
heard({ effectiveDirective: "connect-src" });
console.log(loaded);
"""

REFUSED = """
globalThis.location = new URL("http://127.0.0.1:1/");
globalThis.document = { addEventListener: () => null };
const refusing = process.argv[2].split(",");
globalThis.fetch = async (url) => {
  const ok = !refusing.includes(new URL(url).port);
  return { ok, status: ok ? 200 : 401, json: async () => (ok ? "run" : {}) };
};
const api = await import(process.argv[1]);
let asked = "";
api.onTokenNeeded(async () => { asked = "token"; });
api.learnControllers([{ rest: "http://127.0.0.1:2", state: "stands by" }]);
console.log(JSON.stringify(await api.ask("run").catch(() => asked)));
"""


FORGED = """
globalThis.location = new URL("http://127.0.0.1:1/");
globalThis.document = { addEventListener: () => null };
const { hmac, sha256 } = await import(process.argv[1].replace("api.js", "sha256.js"));
const [text, hex] = [(t) => new TextEncoder().encode(t), (b) => Buffer.from(b).toString("hex")];
const strangers = process.argv[2].split(",");
globalThis.fetch = async (url, { headers }) => {
  const port = new URL(url).port;
  const body = text(JSON.stringify(strangers.includes(port) ? "made up" : "run"));
  const nonce = headers?.Authorization?.split(".")[1];
  const lines = ["answer", nonce, 200, hex(sha256(body))].join("\\n");
  const mac = strangers.includes(port) ? "00" : hex(hmac(text("token"), text(lines)));
  return { ok: true, status: 200, headers: new Map([["paceline-proof", mac]]),
    arrayBuffer: async () => body, json: async () => JSON.parse(Buffer.from(body)) };
};
const api = await import(process.argv[1]);
api.storeToken("token");
api.learnControllers([{ rest: "http://127.0.0.1:2", state: "stands by" }]);
console.log(JSON.stringify(await api.ask("run").catch((e) => e.message.split(" ")[1])));
"""


def run(script: str, module: str, tmp_path: Path, *arguments: str, given: str = "") -> object:
    """The JSON that ``script`` prints of a module of the page."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node")
    for file in STATIC.glob("*.js"):
        shutil.copy(file, tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    done = subprocess.run(
        [node, "--input-type=module", "-e", script, str(tmp_path / module), *arguments],
        input=given,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return json.loads(done.stdout)


def test_it_gives_what_the_controller_expects(tmp_path: Path) -> None:
    texts = ["", "abc", "\u20ac" * 40, *("x" * n for n in (54, 55, 56, 63, 64, 65, 119, 120, 5000))]
    cases = [(key, text) for key in ("k" * 48, "k" * 65, "") for text in texts]
    assert run(SCRIPT, "sha256.js", tmp_path, given=json.dumps(cases)) == [
        [
            hashlib.sha256(text.encode()).hexdigest(),
            hmac.new(key.encode(), text.encode(), hashlib.sha256).hexdigest(),
        ]
        for key, text in cases
    ]


@pytest.mark.parametrize(("protocol", "loaded"), [("http:", 0), ("https:", 1)])
def test_a_page_whose_port_may_be_a_strangers_by_now_is_not_loaded_anew(
    tmp_path: Path, protocol: str, loaded: int
) -> None:
    assert run(VIOLATED, "api.js", tmp_path, protocol) == loaded


@pytest.mark.parametrize(("refusing", "found"), [("1", "run"), ("2", "run"), ("1,2", "token")])
def test_who_took_the_port_of_a_dead_leader_and_refuses_is_left_for_the_next(
    tmp_path: Path, refusing: str, found: str
) -> None:
    assert run(REFUSED, "api.js", tmp_path, refusing) == found


@pytest.mark.parametrize(("strangers", "found"), [("1", "run"), ("2", "run"), ("1,2", "stranger")])
def test_who_took_a_port_and_answers_with_made_up_json_is_not_believed(
    tmp_path: Path, strangers: str, found: str
) -> None:
    assert run(FORGED, "api.js", tmp_path, strangers) == found
