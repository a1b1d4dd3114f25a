"""Claims on the time of a round, as ratios and exponents.

They import the library and the engine of claims, not `report` or `cli`.
"""
