"""Seeded, virtual-time simulation of a whole run around the controller that ships.

Workers, network, Redis, collectives and weights are models. A seed fixes the fleet, the timing and
every fault, so a failing seed fails again.
"""
