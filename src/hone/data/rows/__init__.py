"""What a row of a dataset means: Hone recognises its kind by its columns and makes a group or a task of it.

Doors: `convert` (rows to groups or tasks, with a limit of tokens), `columns` (RowKind, other projects' columns),
`record` (one row of each kind to rollouts), `pairs` (preference pairs and their uses), `parse` (outside values).
Behind them: `code_asserts` and `code_names` (tests that rows bring for programs).
May import: data.text, types, errors.
"""
