"""The engine: continuous batching of requests over a runner.

Doors: `engine` (Engine), `requests` (Request, RequestOutput), `params` (SampleParams), `runners.choose` (make_runner),
`static_batch` for models without a runner. `schedule` decides what runs, `blocks` counts who holds which paged block,
`draw` draws tokens, `stop_strings` finds stop strings, `runner` is what the engine asks of a model.
May import: types, errors, data.text.detokenizer, model (in runners/).
"""
