"""From logits to tokens, for the rows of a pass."""
