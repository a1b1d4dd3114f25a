"""Claims on what a round costs."""
