"""Workers under test: protocol-only, of emulated durations, and single members of a mesh."""
