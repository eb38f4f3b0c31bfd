"""The page's own SHA-256, by which it proves that it has the token."""

import hashlib
import hmac
import json
import shutil
import subprocess
from pathlib import Path

import pytest

MODULE = Path(__file__).parents[3] / "controller" / "rest" / "static" / "sha256.js"
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


def test_it_gives_what_the_controller_expects(tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node")
    texts = ["", "abc", "\u20ac" * 40, *("x" * n for n in (54, 55, 56, 63, 64, 65, 119, 120, 5000))]
    cases = [(key, text) for key in ("k" * 48, "k" * 65, "") for text in texts]
    module = tmp_path / "sha256.mjs"
    module.write_text(MODULE.read_text())
    done = subprocess.run(
        [node, "--input-type=module", "-e", SCRIPT, str(module)],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(done.stdout) == [
        [
            hashlib.sha256(text.encode()).hexdigest(),
            hmac.new(key.encode(), text.encode(), hashlib.sha256).hexdigest(),
        ]
        for key, text in cases
    ]
