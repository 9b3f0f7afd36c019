"""DSpark: block drafting with a Markov head and a confidence head."""
