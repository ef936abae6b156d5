"""`hone demo`: a small model through every stage on a laptop's CPU, with a table and a report at the end.

`world` makes the problems and files, `stages` the recipes, `journey` runs them one after the other, `examine` marks
each stage on held-out problems, `summary` shows the marks.
Door: `journey.main`. It may import every room below the commands; only they and benchmarks import it.
"""
