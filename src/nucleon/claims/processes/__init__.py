"""Claims on a process: the conversion, its plans, the average, the ripples.

They import the library and the engine of claims, not `report` or `cli`.
"""
