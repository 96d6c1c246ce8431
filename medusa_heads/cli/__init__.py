"""The commands `train-heads` and `medusa-heads`; heavy imports wait until a verb runs."""
