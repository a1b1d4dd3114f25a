"""Claims of Appendix A: rotations, quasi-Newton, training."""
