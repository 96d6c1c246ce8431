"""The commands `train-heads`, `train-draft` and `medusa-heads`; heavy imports wait."""
