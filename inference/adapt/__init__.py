"""How much to draft, and by whom: evidence, clock, budget, bandit.

evidence   how often drafted tokens were accepted, by source and confidence
clock      seconds of a step, and of drafting for it
budget     the size of draft that gains the most: expected tokens against seconds
bandit     which way of drafting to take, and what trying another one may cost

lessons    what all of them learn, kept for the next process

Measured figures are where the clock begins; `step_bench` takes them, `measure` keeps them
on disk.
"""
