"""Claims on games: learners against streams, regret beside bounds.

They import the library and the engine of claims, not `report` or `cli`.
"""
