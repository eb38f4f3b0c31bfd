"""Refusal codes: the reasons for which the leader refuses a request for good."""

from __future__ import annotations

from enum import StrEnum


class RefusalCode(StrEnum):
    FENCED = "fenced"  # the caller's incarnation is over or was never registered
    UNKNOWN = "unknown"  # the worker, run or payload that the request names does not exist
    INVALID = "invalid"  # the request can never be granted as it is
    STOPPED = "stopped"  # the run has ended
    CHANGED = "changed"  # conflict: the state that the caller saw is no longer the present one

    @property
    def grpc_status(self) -> str:
        """Name of the gRPC status that carries it; ``RequestRefused.code`` on the caller's side."""
        return _GRPC_STATUS.get(self, "FAILED_PRECONDITION")


_GRPC_STATUS = {RefusalCode.UNKNOWN: "NOT_FOUND", RefusalCode.INVALID: "INVALID_ARGUMENT"}
