"""The built-in recipes: runs to start from, by name, as in `hone run grpo`. They are part of the installed package.

Each file has a function `recipe`, which says what is trained on what. The command line overrides its settings. To
change more, write a file into a folder `recipes` of your own, where it comes before the one here; `hone recipes NAME`
prints one to begin with. Nothing imports a recipe: `hone.config.load` runs the file.
May import: the public names of `hone`, config.load (to begin from another recipe).
"""
