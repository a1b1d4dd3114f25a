"""Looking at a run: diagnostics of every matrix, and certificates of its regret."""
