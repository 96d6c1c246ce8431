"""The verbs of `medusa-heads`, one file each."""
