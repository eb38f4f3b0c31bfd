"""Packed rows of a step: groups, packing, and forwards. A row of data is an example here."""
