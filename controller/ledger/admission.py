"""Admission by staleness: how many groups may have been dispatched while a version is served."""


def dispatch_limit(served_step: float, max_staleness: float, groups_per_step: int) -> int:
    """Groups that may have been dispatched in all, whether trained, ready or leased, while engines
    serve the weights after ``served_step`` steps. A further group could only train in a step that
    is more than ``max_staleness`` later."""
    return int((served_step + max_staleness + 1) * groups_per_step)
