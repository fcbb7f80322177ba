"""KV blocks that move between workers: their contents, who serves them, who reads them."""
