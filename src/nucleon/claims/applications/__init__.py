"""Claims of Appendix A: rotations, quasi-Newton, training.

They import the library and the engine of claims, not `report` or `cli`.
"""
