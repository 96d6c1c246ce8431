"""The target's hidden states: computed, cached, and spread over processes."""
