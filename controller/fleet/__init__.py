"""Fleet management in the leader: worker sessions, liveness, providers, autoscaling."""
