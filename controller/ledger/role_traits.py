"""Traits of the roles: what differs between policy replicas, rollout workers and scorers."""

from dataclasses import dataclass

from controller.ledger.enums import Role


@dataclass(frozen=True, slots=True)
class RoleTraits:
    words: str  # For users: "policy replica"
    command: str  # ``paceline COMMAND`` starts one by hand
    setting: str  # fleet.SETTING is the desired number; SETTING_min and SETTING_max limit it
    mesh: bool = False
    """Trains: it is a member of the gradient mesh, holds the state and sends weights."""
    receives: bool = False  # It receives weights over a link of its own
    leases: bool = False  # It leases tasks
    spares: bool = False  # Some of its workers may stand by
    serves: bool = False  # Rollout workers call it, at the address that it registers with


TRAITS = {
    Role.POLICY: RoleTraits("policy replica", "policy", "policy", mesh=True),
    Role.ROLLOUT: RoleTraits(
        "rollout worker", "rollout", "rollout", receives=True, leases=True, spares=True
    ),
    Role.SCORER: RoleTraits("scorer", "scorer", "scorers", serves=True),
}
