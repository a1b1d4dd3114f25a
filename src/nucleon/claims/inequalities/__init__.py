"""Claims on inequalities between matrices, each side by the library and by the oracle.

Imports the library and the engine of claims, not `report` or `cli`.
"""
