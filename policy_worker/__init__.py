"""The trainer role: packs groups, computes the loss, reduces over the mesh, commits, publishes."""
