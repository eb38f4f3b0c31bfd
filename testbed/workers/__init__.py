"""Protocol-only workers, emulated workers and single mesh members."""
