"""Sections of a configuration file: the fields of each table and their rules."""
