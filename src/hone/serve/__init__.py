"""`hone serve` and `hone chat`: a model behind an OpenAI-compatible server, or in the terminal.

A request goes server -> http -> app -> body -> dispatcher, its answer detokenize -> reply -> http.
Doors: `load.load` gives a model with its engine; `app.make_app` and `server.serve` serve it;
`chat.Conversation` and `chat.Terminal` talk with it.
Only `hone.commands` imports it. May import: engine, model, data.text, types, errors.
"""
