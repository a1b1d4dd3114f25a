"""Claims of a running process: the conversion, its plans, the ripples."""
