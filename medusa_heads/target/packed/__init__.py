"""A target's large matrices once more, as a CPU multiplies few rows by them faster."""
