"""Claims that are played: learners on streams, beside their bounds."""
