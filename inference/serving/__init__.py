"""How heads are served by engines of other projects, which verify chains and no trees."""
