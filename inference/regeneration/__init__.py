"""The target answers prompts itself: what is asked, who answers, what is kept."""
