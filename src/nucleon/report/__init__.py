"""Runs on disk, their figures, and one self-contained page over them."""
