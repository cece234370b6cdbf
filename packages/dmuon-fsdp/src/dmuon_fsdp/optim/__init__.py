"""Orders a step: parameter groups, owners' batches, the rest by AdamW."""
