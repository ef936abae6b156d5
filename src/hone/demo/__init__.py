"""`hone demo`: a small model through every stage on a laptop's CPU, with a table and a report at the end.

`world` makes the problems and files, `stages` the recipes, `journey` runs them one after the other, `examine` marks
each stage on held-out problems, `summary` shows the marks.
Door: `journey.main`. Only the commands and benchmarks import it.
May import: every room below it.
"""
