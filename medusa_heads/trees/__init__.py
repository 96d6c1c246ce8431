"""Trees of draft tokens: their shape, how they grow, the statistics that shape them."""
