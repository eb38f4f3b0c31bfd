"""The gRPC services of a controller: worker, rollout, policy and admin, with message validation."""
