"""Weight snapshots: manifest, checksums and transfer from policy ranks to engines."""
