"""How heads are learned: the target's own text in, a checkpoint folder out."""
