"""Model that a policy replica trains, and the rest of its training state."""
