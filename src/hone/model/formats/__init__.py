"""Models as files: Hugging Face folders, PEFT adapters, GGUF, llama2.c, the Hub. Nothing that is read is executed.

Doors: `folder` (read a model), `save` (write one), `peft` (adapters), `cache` (which folder a name means), `fetch`
(bring a model there), `foreign` (any other model of transformers).
Behind them: `hf_config`, `weight_files`, `gguf`, `gguf_tokenizer`, `llama2c`, `hub`.
May import: model, data.text, storage.textfile, checkpoint.names, errors.
"""
