"""The field trial's cases, a module for each class of faults.

A module here has TITLE, a line for the page, and `cases(quick)`, which yields its cases. A case uses only what a user
of any version has: the command line, and public functions that both trees have. The same cases then judge the code
before and after a change (`python -m benchmarks.trial --before FOLDER`).
"""
