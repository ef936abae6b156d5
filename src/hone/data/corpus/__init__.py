"""Cleaning text for pre-training: filters, duplicates, overlap with evaluation sets, and a report of what was dropped.

Doors: `pipeline` (a cleaning run), `settings` (CorpusSettings), `report`, `compare` (overlap), `language`.
Behind them: `documents`, `shards`, `run`, `filters`, `quality`, `duplicates`, `overlap`, `words`, `tally`, `pool`,
`atomic`.
A run that is killed can be continued. Its output does not depend on the number of workers.
May import: data.feed, data.text, storage.textfile, errors.
"""
