"""Claims on processes: the conversion, its plans, the average, the ripples.

Imports the library and the engine of claims, not `report` or `cli`.
"""
