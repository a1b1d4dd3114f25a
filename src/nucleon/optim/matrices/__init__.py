"""A parameter read as matrices, and matrices of one shape as one stack, short side first."""
