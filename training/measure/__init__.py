"""What was learnt: ranks, calibration, and the report of a run."""
