"""Seeded, virtual-time simulation of a whole run around the real ledger and the real liveness rules.

Everything but the two is a model: processes, network, Redis, collectives, weights. A seed fixes the
fleet, the timing and every fault, so a failing seed fails again.
"""
