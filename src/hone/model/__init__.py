"""The model: a decoder as it is defined, and what losses and rewards read of it.

Doors: `decoder` (Decoder), `config` (DecoderConfig), `policy` (Policy, critics), `scorer` (Scorer), `lora` and
`adapters`, `teacher`, `inspect` (for `hone inspect`). Rooms: layout/ (a batch as the decoder is fed it), vocab/
(log-probs, entropies, KLs), backends/ (faster ways to compute all this), kernels/ (device code), formats/ (files of
other libraries).
May import: types, errors, data.text, storage (in formats/).
"""
