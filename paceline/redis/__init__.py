"""Redis: clients for every kind of URL, the embedded server, the leader's lease."""
