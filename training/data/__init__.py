"""From a corpus to the rows that training reads."""
