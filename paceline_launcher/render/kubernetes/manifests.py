"""Manifests that every kind of job on Kubernetes has: configuration, storage, network, services,
disruption."""

from __future__ import annotations

from collections.abc import Mapping

from paceline_launcher.render.kubernetes.pods import PART_OF, runs_claim
from paceline_launcher.render.request import Document, RenderRequest, Secrets, required_keys
from paceline_launcher.render.yaml_text import yaml_text

STORAGE_COMMENT = (
    "Checkpoints and run files, seen by every pod: the storage class must offer ReadWriteMany."
)
NETWORK_COMMENT = (
    "Only pods of this run reach it. torch.distributed does not authenticate the connections on which "
    "gradients and\nweights travel: whoever reaches a worker could join or disturb them. The cluster's "
    "network plugin must enforce\nNetworkPolicy (Calico and Cilium do)."
)


def config_map(request: RenderRequest, text: str) -> Document:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{request.name}-config"},
        "data": {"run.toml": text},
    }


def runs_storage(request: RenderRequest) -> Document:
    spec: Document = {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": f"{request.options.storage_gib}Gi"}},
    }
    if request.options.storage_class is not None:
        spec["storageClassName"] = request.options.storage_class
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": runs_claim(request)},
        "spec": spec,
    }


def disruption_budget(name: str, selector: Mapping[str, str]) -> Document:
    """A node that is emptied evicts these pods one after the other."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": name},
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": dict(selector)}},
    }


def service(
    name: str, selector: Mapping[str, str], ports: Mapping[str, int], *, headless: bool
) -> Document:
    spec: Document = {"selector": dict(selector)}
    if headless:
        # Pods find one another before they are ready.
        spec = {"clusterIP": "None", "publishNotReadyAddresses": True, **spec}
    if ports:
        spec["ports"] = [{"name": port, "port": number} for port, number in ports.items()]
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}


def namespace(request: RenderRequest, profile: str) -> Document:
    """``profile``: of pods that need neither the host's network nor RDMA."""
    options = request.options
    more = options.host_network or options.rdma is not None
    return {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {
            "name": options.namespace,
            "labels": {"pod-security.kubernetes.io/enforce": "privileged" if more else profile},
        },
    }


def network_policy(request: RenderRequest) -> Document:
    own = {PART_OF: request.name}
    sources: list[Document] = [{"podSelector": {"matchLabels": own}}]
    if request.options.node_cidr is not None:
        sources.append({"ipBlock": {"cidr": request.options.node_cidr}})
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": f"{request.name}-private"},
        "spec": {
            "podSelector": {"matchLabels": own},
            "policyTypes": ["Ingress"],
            "ingress": [{"from": sources}],
        },
    }


def kustomization(request: RenderRequest, files: list[str], secrets: Secrets) -> str:
    """Text of the file that names the others. ``secrets``: all that their pods refer to."""
    options = request.options
    document = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": options.namespace,
        "resources": files,
    }
    return yaml_text(
        [document],
        f"kubectl apply -k .      The namespace {options.namespace} needs the secret {options.secret} first, with "
        f"{', '.join(required_keys(secrets))}:\ndocs/clusters.md of Paceline makes one.",
    )
