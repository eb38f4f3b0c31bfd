"""The Kubernetes provider against a server that speaks the API's protocol: TLS, bearer token, the
scale subresource with optimistic concurrency, Status objects for errors."""

import json
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from paceline.config.sections.workers import KubernetesConfig
from paceline.providers.base import Trouble
from paceline.providers.kubernetes import KubernetesProvider
from paceline.v1 import admin_pb2

PREFIX = "/apis/apps/v1/namespaces/training"


class ApiServer:
    """Scale subresources of workloads, as the API server serves them."""

    def __init__(self, where: Path) -> None:
        self.replicas = {"statefulsets/paceline-policy": 1, "deployments/rollouts": 2}
        self.version = 100
        self.token = "first"
        self.requests: list[tuple[str, str]] = []
        self.conflicts = 0
        """So many writes find that someone was faster."""
        self.forbidden = False
        self.pods: dict[str, int] = {}
        self.lock = threading.Lock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(where / "tls.crt", where / "tls.key")
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.url = f"https://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(
        self, method: str, path: str, headers: Any, body: bytes
    ) -> tuple[int, dict[str, Any]]:
        with self.lock:
            self.requests.append((method, path))
            if headers.get("Authorization") != f"Bearer {self.token}":
                return status(401, "Unauthorized", "Unauthorized")
            if self.forbidden:
                return status(403, "Forbidden", "statefulsets/scale is forbidden: User cannot")
            workload = path.removeprefix(PREFIX + "/").removesuffix("/scale")
            if not path.endswith("/scale") or workload not in self.replicas:
                return status(404, "NotFound", f"{workload} not found")
            if method == "PATCH":
                if headers.get("Content-Type") != "application/merge-patch+json":
                    return status(415, "UnsupportedMediaType", "the body is of no patch type")
                patch = json.loads(body)
                given = patch.get("metadata", {}).get("resourceVersion")
                if self.conflicts or given not in (None, str(self.version)):
                    self.conflicts = max(0, self.conflicts - 1)
                    self.version += 1
                    return status(409, "Conflict", "the object has been modified")
                self.replicas[workload] = patch["spec"]["replicas"]
                self.version += 1
            return 200, self.scale(workload)

    def scale(self, workload: str) -> dict[str, Any]:
        replicas = self.replicas[workload]
        return {
            "metadata": {"resourceVersion": str(self.version)},
            "spec": {"replicas": replicas},
            "status": {"replicas": self.pods.get(workload, replicas)},
        }

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        api = self

        class Handler(BaseHTTPRequestHandler):
            def reply(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                code, answer = api.answer(self.command, self.path, self.headers, body)
                data = json.dumps(answer).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_PATCH = reply

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler


def status(code: int, reason: str, message: str) -> tuple[int, dict[str, Any]]:
    return code, {"kind": "Status", "message": message, "reason": reason, "code": code}


@pytest.fixture
def pki(tmp_path: Path) -> Path:
    write_certificate(tmp_path)
    (tmp_path / "token").write_text("first\n")
    return tmp_path


@pytest.fixture
def api(pki: Path) -> Iterator[ApiServer]:
    server = ApiServer(pki)
    yield server
    server.close()


def write_certificate(where: Path) -> None:
    """A self-signed one for 127.0.0.1, its own root."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the test's certificate")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", "/CN=api", "-addext"),
            *("subjectAltName=IP:127.0.0.1", "-keyout", str(where / "tls.key")),
            *("-out", str(where / "tls.crt")),
        ],
        check=True,
        capture_output=True,
    )


def provider(api: ApiServer, pki: Path, **changes: Any) -> KubernetesProvider:
    values = {
        "rollout": "deployment/rollouts",
        "namespace": "training",
        "api_url": api.url,
        "token_file": str(pki / "token"),
        "ca_file": str(pki / "tls.crt"),
    }
    return KubernetesProvider(KubernetesConfig(**{**values, **changes}))


def wanted(phase: str = "running", **desired: int) -> admin_pb2.StatusReply:
    return admin_pb2.StatusReply(phase=phase, desired=desired)


async def test_replicas_follow_the_desired_counts_and_nothing_is_written_once_they_do(
    api: ApiServer, pki: Path
) -> None:
    kubernetes = provider(api, pki)
    said = await kubernetes.converge(wanted(policy=3, rollout=2))
    assert said == "statefulset/paceline-policy is scaled from 1 to 3 replicas"
    assert api.replicas == {"statefulsets/paceline-policy": 3, "deployments/rollouts": 2}
    api.requests.clear()
    assert await kubernetes.converge(wanted(policy=3, rollout=2)) == ""
    assert [method for method, _ in api.requests] == ["GET", "GET"]
    api.pods["deployments/rollouts"] = 1
    said = await kubernetes.converge(wanted(policy=3, rollout=2))
    assert said == "deployment/rollouts has 1 of 2 pods"


async def test_another_writer_who_was_faster_is_read_before_it_is_overwritten(
    api: ApiServer, pki: Path
) -> None:
    api.conflicts = 2
    await provider(api, pki).converge(wanted(policy=2))
    assert api.replicas["statefulsets/paceline-policy"] == 2
    assert [method for method, _ in api.requests] == ["GET", "PATCH"] * 3
    api.conflicts = 1000
    with pytest.raises(Trouble, match=r"gave up after 5 write conflicts on .* is scaling it"):
        await provider(api, pki).converge(wanted(policy=3))


async def test_a_missing_workload_or_right_is_told_with_the_remedy(
    api: ApiServer, pki: Path
) -> None:
    with pytest.raises(Trouble, match=r"deployment/ghost: 404.*kubernetes\.rollout"):
        await provider(api, pki, rollout="deployment/ghost").converge(wanted(rollout=2))
    api.forbidden = True
    with pytest.raises(Trouble, match=r"403: .*is forbidden.*get and patch on statefulsets/scale"):
        await provider(api, pki).converge(wanted(policy=2))


async def test_a_renewed_token_is_used_at_once(api: ApiServer, pki: Path) -> None:
    kubernetes = provider(api, pki)
    api.token = "second"
    with pytest.raises(Trouble, match="does not accept the service account"):
        await kubernetes.converge(wanted(policy=2))
    (pki / "token").write_text("second\n")
    await kubernetes.converge(wanted(policy=2))
    assert api.replicas["statefulsets/paceline-policy"] == 2


async def test_a_server_with_an_unknown_certificate_gets_no_token(
    api: ApiServer, pki: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    write_certificate(other)
    with pytest.raises(Trouble, match="does not answer"):
        await provider(api, pki, ca_file=str(other / "tls.crt")).converge(wanted(policy=2))
    with pytest.raises(Trouble, match="must be https"):
        url = api.url.replace("https", "http")
        await provider(api, pki, api_url=url).converge(wanted(policy=2))
    assert api.requests == []


async def test_in_a_pod_the_server_and_namespace_are_found_from_the_environment(
    api: ApiServer, pki: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(api.server.server_address[1]))
    await provider(api, pki, api_url=None).converge(wanted(policy=2))
    assert api.replicas["statefulsets/paceline-policy"] == 2
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    with pytest.raises(Trouble, match="api_url is not set"):
        await provider(api, pki, api_url=None).converge(wanted(policy=2))
    with pytest.raises(Trouble, match="namespace is not set"):
        await provider(api, pki, namespace=None).converge(wanted(policy=2))


async def test_a_run_that_wants_no_workers_changes_no_replicas(api: ApiServer, pki: Path) -> None:
    for phase in ("stopping", "finished", "failed", "waiting for Redis"):
        await provider(api, pki).converge(wanted(phase, policy=5))
    assert api.requests == []
    api.close()
    with pytest.raises(Trouble, match="does not answer"):
        await provider(api, pki).converge(wanted(policy=2))
