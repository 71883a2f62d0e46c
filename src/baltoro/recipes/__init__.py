"""Functions that return complete configurations by scale, and the verbs that run them."""
