"""Kubernetes provider: the replicas of each pool's workload follow the desired counts.

    GET  .../statefulsets/NAME/scale ──► differs? ──► PATCH with the resourceVersion that was read
                                                        409: another writer was faster; read again

It uses only the scale subresource, so the service account needs ``get`` and ``patch`` on it and
nothing else. Pods leave gracefully by their ``preStop`` hook (`paceline drain --wait`). The
workload chooses the pod that leaves: a StatefulSet chooses the highest ordinal.
"""

import asyncio
import json
import os
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from paceline.config.sections.workers import KubernetesConfig
from paceline.providers.base import Provider, Trouble, desired_of
from paceline.rpc.addresses import at
from paceline.v1 import admin_pb2
from paceline.worker_pools import role_of, scorer_of

REQUEST_LIMIT_S = 10.0
CONFLICTS = 5  # write conflicts in a row after which the provider gives up for this time
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Directory of a pod with the token, namespace and root certificate of its service account."""


class KubernetesProvider(Provider):
    name = "kubernetes"

    def __init__(self, config: KubernetesConfig) -> None:
        self._config = config

    async def _converge_pool(self, pool: str, status: admin_pb2.StatusReply) -> str:
        # In a thread, because the client blocks and the leader's loop must not.
        return await asyncio.to_thread(self._scale, pool, desired_of(status, pool))

    def _scale(self, pool: str, desired: int) -> str:
        """Blocks. Returns what the workload still lacks. Raises Trouble."""
        workload = self.workload(pool)
        url = self._url(workload)
        try:
            for _ in range(CONFLICTS):
                scale = self._ask("GET", url)
                replicas = int(scale["spec"].get("replicas", 0))
                if replicas == desired:
                    there = int(scale.get("status", {}).get("replicas", 0))
                    return "" if there == desired else f"{workload} has {there} of {desired} pods"
                change = {
                    "metadata": {"resourceVersion": scale["metadata"]["resourceVersion"]},
                    "spec": {"replicas": desired},
                }
                try:
                    self._ask("PATCH", url, change)
                    return f"{workload} is scaled from {replicas} to {desired} replicas"
                except urllib.error.HTTPError as refusal:
                    if refusal.code != 409:
                        raise
        except urllib.error.HTTPError as refusal:
            raise Trouble(
                f"{workload}: {_explained(role_of(pool), workload, refusal)}"
            ) from refusal
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Trouble(f"the API server does not answer for {workload}: {error}") from error
        raise Trouble(
            f"gave up after {CONFLICTS} write conflicts on {workload}: another controller (an "
            "HPA?) is scaling it"
        )

    def workload(self, pool: str) -> str:
        """Workload of a pool; each scorer has one. Kubernetes allows no "_" in its name."""
        base = str(getattr(self._config, role_of(pool)))
        name = scorer_of(pool)
        return f"{base}-{name.replace('_', '-')}" if name else base

    def _url(self, workload: str) -> str:
        """Address of the workload's scale subresource. Raises Trouble."""
        host = os.environ.get("KUBERNETES_SERVICE_HOST")
        if not host:
            raise Trouble("this process is in no pod: start controllers in pods of the cluster")
        server = at(host, int(os.environ.get("KUBERNETES_SERVICE_PORT", "443")))
        kind, _, name = workload.partition("/")
        place = f"namespaces/{_account('namespace')}/{kind}s/{name}"
        return f"https://{server}/apis/apps/v1/{place}/scale"

    def _ask(self, method: str, url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        # Token and root are read for every request: the kubelet renews the token.
        headers = {"Authorization": f"Bearer {_account('token')}", "Accept": "application/json"}
        data = None
        if body is not None:
            headers["Content-Type"] = "application/merge-patch+json"
            data = json.dumps(body).encode()
        request = urllib.request.Request(url, data, headers, method=method)
        context = ssl.create_default_context(cadata=_account("ca.crt"))
        with urllib.request.urlopen(request, timeout=REQUEST_LIMIT_S, context=context) as answer:
            found: dict[str, Any] = json.load(answer)
            return found


def _account(name: str) -> str:
    try:
        return (ACCOUNT / name).read_text().strip()
    except OSError as error:
        raise Trouble(
            f"{ACCOUNT / name} cannot be read ({error.strerror}): give the pod a service account"
        ) from None


def _explained(role: str, workload: str, refusal: urllib.error.HTTPError) -> str:
    """The API server's reason, which it reports in a Status object, and the remedy."""
    try:
        message = json.load(refusal).get("message", refusal.reason)
    except (ValueError, AttributeError, OSError):
        message = refusal.reason
    remedy = {
        401: "the API server does not accept the service account's token",
        403: "the service account may not scale it: bind it to a role with get and patch on "
        f"{workload.partition('/')[0]}s/scale",
        404: f"there is no such workload: apply it, or set kubernetes.{role}",
    }.get(refusal.code, "retrying")
    return f"{refusal.code}: {message} ({remedy})"
