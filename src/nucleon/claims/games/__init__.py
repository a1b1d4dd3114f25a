"""Claims on games: learners against streams, regret beside bounds.

Imports the library and the engine of claims, not `report` or `cli`.
"""
