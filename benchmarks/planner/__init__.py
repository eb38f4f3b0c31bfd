"""Errors of the capacity planner against published runs."""
