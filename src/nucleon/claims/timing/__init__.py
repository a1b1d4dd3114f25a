"""Claims on the time of a round, as ratios and exponents.

Imports the library and the engine of claims, not `report` or `cli`.
"""
