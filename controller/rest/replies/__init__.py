"""Replies of the REST interface, from the ledger, the run files and the archive."""
