"""What learned rewards are for besides training: solutions labelled step by step, and the best of several chosen."""
