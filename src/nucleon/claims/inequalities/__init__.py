"""Claims that are inequalities between matrices."""
