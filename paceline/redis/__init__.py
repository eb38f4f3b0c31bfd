"""Redis: clients for every kind of URL, the embedded server and the leader's lease."""
