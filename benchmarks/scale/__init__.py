"""Scale of the fleet on one machine, without its accelerators."""

FLEET_COLUMNS = {
    "register_ms": "registration of a worker, ms",
    "empty_lease_us": "lease that finds nothing, us",
    "lease_us": "lease of one task, us",
    "collect_ms": "directives of an unchanged fleet, ms",
    "tick_ms": "tick of the failure detection, ms",
    "publish_s": "one published version, s",
    "of_commit_s": "of it: votes and commit, s",
    "mesh_s": "new mesh of the replicas, s",
}
