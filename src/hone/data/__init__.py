"""From data to batches: text to tokens, rows to rollouts, files to an endless order, rollouts to tensors.

Doors: `collate` (rollouts to a batch, the one shift), `text` (tokenizer and chats), `rows` (what a row means), `feed`
(where rows come from), `corpus` (cleaning text for pre-training).
May import: types, errors, storage.textfile.
"""
