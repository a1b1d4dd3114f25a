"""Routing of the parameters of a model, and its explanation."""
