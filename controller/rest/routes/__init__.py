"""Routes of the REST interface, and the parameters of their requests."""
