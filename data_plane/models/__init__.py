"""Models: from token ids and positions to logits, writing KV through the attention layers only."""
