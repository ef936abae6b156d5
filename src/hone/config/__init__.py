"""Settings: what a recipe says, how it is changed and checked. Below the modules that read it, settings are arguments.

Doors: `recipe` (Recipe and its parts), `overrides` (`a.b=value`), `load` (recipe and reward files), `rules` (what fits
together), `changes` (what a resumed run may change), `values` (does a value fit a type).
May import: errors, storage.textfile, log.limits.
"""
