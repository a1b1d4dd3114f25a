"""What steps the work of an optimizer: `reference`, `cuda`, `ranks` and `adamw`."""
