"""Generation: engines, rewards and the loop that leases tasks and hands in scored groups."""
