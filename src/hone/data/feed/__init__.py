"""Where rows come from, and in which order: an endless, resumable order over files, the Hub or rows in memory.

Doors: `locate` (what `data=` names), `assemble` (its feed, mixed by weight), `source` (Feed; rows in memory), `stream`
(files larger than memory), `token_batches` (batches by tokens).
Behind them: `files` and `columnar` (formats), `row_store` (files, Hub and memory look alike), `registry` (datasets by
name).
May import: data.rows, data.text, types, errors.
"""
