"""Text and tokens: the tokenizer, chats under their templates, and the mask of what the policy writes.

Doors: `tokenizer` (Tokenizer, train_bpe), `chat` (render and encode chats, prompts, completions), `messages` (checks of
a chat), `stop_token` (is the stop token the right one), `pretrained` (the one way to transformers).
Behind them: `dialogue`, `rendering` and `template` (chat templates), `worker` and `worker_process` (the process with
limits that handles what strangers wrote), `tokenizer_folder`, `json_object`.
May import: types, errors.
"""
