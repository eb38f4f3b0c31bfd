"""The Kubernetes provider against a server that speaks the API's protocol: TLS, bearer token, the
scale subresource with optimistic concurrency, Status objects for errors."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.config.sections.workers import KubernetesConfig
from paceline.providers import kubernetes as of_kubernetes
from paceline.providers.base import Trouble
from paceline.providers.kubernetes import KubernetesProvider
from paceline.v1 import admin_pb2
from tests.fakes.http_server import Answer, HttpServer
from tests.fixtures.certificates import self_signed

PREFIX = "/apis/apps/v1/namespaces/training"


class ApiServer(HttpServer):
    """Scale subresources of workloads, as the API server serves them."""

    def __init__(self, where: Path) -> None:
        self.certificate, key = self_signed(where)
        super().__init__((self.certificate, key))
        self.replicas = {"statefulsets/paceline-policy": 1, "deployments/rollouts": 2}
        self.version = 100
        self.token = "first"
        self.requests: list[str] = []
        self.conflicts = 0
        """So many writes find that someone was faster."""
        self.forbidden = False
        self.pods: dict[str, int] = {}
        self.account = where / "account"
        """A pod's service account."""
        self.account.mkdir()
        (self.account / "namespace").write_text("training")
        (self.account / "ca.crt").write_bytes(self.certificate.read_bytes())
        self.token_file = self.account / "token"
        self.token_file.write_text("first\n")

    def answer(self, asked: Any, body: bytes) -> Answer:
        method, path, headers = asked.command, asked.path, asked.headers
        self.requests.append(method)
        if headers.get("Authorization") != f"Bearer {self.token}":
            return status(401, "Unauthorized")
        if self.forbidden:
            return status(403, "statefulsets/scale is forbidden: User cannot")
        workload = path.removeprefix(PREFIX + "/").removesuffix("/scale")
        if not path.endswith("/scale") or workload not in self.replicas:
            return status(404, f"{workload} not found")
        if method == "PATCH":
            if headers.get("Content-Type") != "application/merge-patch+json":
                return status(415, "the body is of no patch type")
            patch = json.loads(body)
            given = patch.get("metadata", {}).get("resourceVersion")
            self.version += 1
            if self.conflicts or given not in (None, str(self.version - 1)):
                self.conflicts = max(0, self.conflicts - 1)
                return status(409, "the object has been modified")
            self.replicas[workload] = patch["spec"]["replicas"]
        replicas = self.replicas[workload]
        return 200, {
            "metadata": {"resourceVersion": str(self.version)},
            "spec": {"replicas": replicas},
            "status": {"replicas": self.pods.get(workload, replicas)},
        }


def status(code: int, message: str) -> Answer:
    return code, {"kind": "Status", "message": message, "code": code}


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    """This process is in a pod."""
    with ApiServer(tmp_path) as server:
        monkeypatch.setattr(of_kubernetes, "ACCOUNT", server.account)
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
        yield server


def provider(rollout: str = "deployment/rollouts") -> KubernetesProvider:
    return KubernetesProvider(KubernetesConfig(rollout=rollout))


def wanted(phase: str = "running", **desired: int) -> admin_pb2.StatusReply:
    return admin_pb2.StatusReply(phase=phase, desired=desired)


async def test_replicas_follow_the_desired_counts_and_nothing_is_written_once_they_do(
    api: ApiServer,
) -> None:
    kubernetes = provider()
    said = await kubernetes.converge(wanted(policy=3, rollout=2))
    assert said == "statefulset/paceline-policy is scaled from 1 to 3 replicas"
    assert api.replicas == {"statefulsets/paceline-policy": 3, "deployments/rollouts": 2}
    api.requests.clear()
    assert await kubernetes.converge(wanted(policy=3, rollout=2)) == ""
    assert api.requests == ["GET", "GET"]
    api.pods["deployments/rollouts"] = 1
    said = await kubernetes.converge(wanted(policy=3, rollout=2))
    assert said == "deployment/rollouts has 1 of 2 pods"


async def test_another_writer_who_was_faster_is_read_before_it_is_overwritten(
    api: ApiServer,
) -> None:
    api.conflicts = 2
    await provider().converge(wanted(policy=2))
    assert api.replicas["statefulsets/paceline-policy"] == 2
    assert api.requests == ["GET", "PATCH"] * 3
    api.conflicts = 1000
    with pytest.raises(Trouble, match=r"gave up after 5 write conflicts on .* is scaling it"):
        await provider().converge(wanted(policy=3))


async def test_a_missing_workload_or_right_is_told_with_the_remedy(api: ApiServer) -> None:
    with pytest.raises(Trouble, match=r"deployment/ghost: 404.*kubernetes\.rollout"):
        await provider("deployment/ghost").converge(wanted(rollout=2))
    api.forbidden = True
    with pytest.raises(Trouble, match=r"403: .*is forbidden.*get and patch on statefulsets/scale"):
        await provider().converge(wanted(policy=2))


async def test_a_renewed_token_is_used_at_once(api: ApiServer) -> None:
    kubernetes = provider()
    api.token = "second"
    with pytest.raises(Trouble, match="does not accept the service account"):
        await kubernetes.converge(wanted(policy=2))
    api.token_file.write_text("second\n")
    await kubernetes.converge(wanted(policy=2))
    assert api.replicas["statefulsets/paceline-policy"] == 2


async def test_a_server_with_an_unknown_certificate_gets_no_token(
    api: ApiServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other, _ = self_signed(tmp_path_factory.mktemp("other"))
    (api.account / "ca.crt").write_bytes(other.read_bytes())
    with pytest.raises(Trouble, match="does not answer"):
        await provider().converge(wanted(policy=2))
    assert api.requests == []


async def test_outside_of_a_pod_the_provider_says_so(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (api.account / "token").unlink()
    with pytest.raises(Trouble, match="give the pod a service account"):
        await provider().converge(wanted(policy=2))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    with pytest.raises(Trouble, match="in no pod"):
        await provider().converge(wanted(policy=2))


async def test_a_run_that_wants_no_workers_changes_no_replicas(api: ApiServer) -> None:
    for phase in ("stopping", "finished", "failed", "waiting for Redis"):
        await provider().converge(wanted(phase, policy=5))
    assert api.requests == []
    api.close()
    with pytest.raises(Trouble, match="does not answer"):
        await provider().converge(wanted(policy=2))
