"""The target answers prompts itself: what is asked, who answers, what is kept, what is counted."""
