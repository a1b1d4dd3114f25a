"""Where each parameter of a model goes, and why."""
