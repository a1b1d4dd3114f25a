"""Measurements of a run: diagnostics of every matrix, and certificates of its regret.

Imports the engines and `nucleon.certificate`; only `optim.base` imports it.
"""
