"""The model: a decoder as it is defined, and what losses and rewards read of it.

Doors: `decoder` (Decoder), `config` (DecoderConfig), `layout` (from a batch to hidden states), `rows` (lists of tokens
and the attention over them), `policy` (Policy, critics), `scorer` (Scorer), `lora`, `teacher`, `inspect` (for
`hone inspect`). Rooms: vocab/ (log-probs, entropies, KLs), backends/ (faster ways to compute all this), kernels/
(device code), formats/ (files of other libraries).
May import: types, errors, data.text, storage (in formats/ and kernels/).
"""
