"""Roof of Paceline: the commands, the launcher, checks before a start, and job files for clusters.

Only this package imports the roles; nothing imports it.
"""
