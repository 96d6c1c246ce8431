"""Trees of drafted tokens: their shape, how they grow, and the statistics that shape them."""
