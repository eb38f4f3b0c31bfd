"""Kubernetes: the replicas of a role's workload follow the desired counts.

    GET  .../statefulsets/NAME/scale ──► differs? ──► PATCH with the resourceVersion that was read
                                                        409: someone was faster; read again

Only the scale subresource is touched, so the service account needs ``get`` and ``patch`` on it and
nothing else. Pods leave gracefully by their own ``preStop`` (`paceline drain --wait`); which pod goes
is the workload's choice: a StatefulSet's is the one with the highest ordinal.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from paceline.config.schema import KubernetesConfig
from paceline.providers.base import AT_WORK, ROLES, Provider, Trouble, desired_of
from paceline.v1 import admin_pb2

LIMIT_S = 10.0
"""Of one request."""
CONFLICTS = 5
"""So many times in a row another writer may be faster before a turn ends."""
NAMESPACE_FILE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"


class KubernetesRefused(Exception):
    """The API server answered with an error status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class KubernetesProvider(Provider):
    name = "kubernetes"

    def __init__(self, config: KubernetesConfig) -> None:
        self._config = config

    async def converge(self, status: admin_pb2.StatusReply) -> str:
        if status.phase not in AT_WORK:
            return ""
        unfinished = []
        for role in ROLES:
            if role in status.desired:
                # A thread each: the client blocks, the leader's loop must not.
                missing = await asyncio.to_thread(self._scale, role, desired_of(status, role))
                unfinished.append(missing)
        return "; ".join(filter(None, unfinished))

    def _scale(self, role: str, wanted: int) -> str:
        """Blocks. Returns what the workload still lacks. Raises Trouble."""
        workload = str(getattr(self._config, role))
        path = self._path(workload)
        try:
            for _ in range(CONFLICTS):
                scale = self._ask("GET", path)
                replicas = int(scale["spec"].get("replicas", 0))
                if replicas == wanted:
                    there = int(scale.get("status", {}).get("replicas", 0))
                    return "" if there == wanted else f"{workload} has {there} of {wanted} pods"
                change = {
                    "metadata": {"resourceVersion": scale["metadata"]["resourceVersion"]},
                    "spec": {"replicas": wanted},
                }
                try:
                    self._ask("PATCH", path, change)
                    return f"{workload} goes from {replicas} to {wanted} replicas"
                except KubernetesRefused as refusal:
                    if refusal.status != 409:
                        raise
        except KubernetesRefused as refusal:
            raise Trouble(self._explained(workload, refusal)) from refusal
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Trouble(f"the API server cannot be asked about {workload}: {error}") from error
        raise Trouble(f"{workload} is changed by someone else all the time (an autoscaler?)")

    def _path(self, workload: str) -> str:
        kind, _, name = workload.partition("/")
        return f"/apis/apps/v1/namespaces/{self._namespace()}/{kind}s/{name}/scale"

    def _namespace(self) -> str:
        if self._config.namespace is not None:
            return self._config.namespace
        try:
            return Path(NAMESPACE_FILE).read_text().strip()
        except OSError:
            raise Trouble(
                "kubernetes.namespace is not set, and this process is in no pod that has one"
            ) from None

    def _base(self) -> str:
        if self._config.api_url is not None:
            return self._config.api_url.rstrip("/")
        host = os.environ.get("KUBERNETES_SERVICE_HOST")
        if not host:
            raise Trouble("kubernetes.api_url is not set, and this process is in no pod")
        port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        # Both are read anew each time: the kubelet renews the token, an administrator the root.
        try:
            token = Path(self._config.token_file).read_text().strip()
        except OSError as error:
            raise Trouble(
                f"kubernetes.token_file {self._config.token_file}: {error.strerror}"
            ) from None
        headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
        data = None
        if body is not None:
            headers["Content-Type"] = "application/merge-patch+json"
            data = json.dumps(body).encode()
        url = self._base() + path
        if not url.startswith("https://"):
            raise Trouble("kubernetes.api_url must be https: the token would be readable otherwise")
        request = urllib.request.Request(url, data, headers, method=method)
        try:
            context = ssl.create_default_context(cafile=self._config.ca_file)
        except OSError as error:
            raise Trouble(f"kubernetes.ca_file {self._config.ca_file}: {error}") from None
        try:
            with urllib.request.urlopen(request, timeout=LIMIT_S, context=context) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except urllib.error.HTTPError as error:
            raise KubernetesRefused(error.code, _message(error)) from error

    def _explained(self, workload: str, refusal: KubernetesRefused) -> str:
        remedy = {
            401: "the service account's token is not accepted",
            403: "the service account may not scale it: bind it to a role with get and patch on "
            f"{workload.partition('/')[0]}s/scale",
            404: f"there is no such workload: apply it, or set kubernetes.{self._role(workload)}",
        }.get(refusal.status, "trying again")
        return f"{workload}: {refusal} ({remedy})"

    def _role(self, workload: str) -> str:
        return next(role for role in ROLES if getattr(self._config, role) == workload)


def _message(error: urllib.error.HTTPError) -> str:
    """Of the Status object that the API server answers errors with."""
    try:
        return str(json.load(error).get("message", error.reason))
    except (ValueError, AttributeError, OSError):
        return str(error.reason)
