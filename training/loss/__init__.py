"""What is minimised, in chunks that never hold all logits."""
