"""Rewards that models give: trained heads, process models, and language models as judges.

Doors: `load.reward_model` and `load.process_model` from folders, `judge.Judge` from a file of settings,
`endpoint.Endpoint` for a model behind a URL, `reward_model.Ensemble` for several of them.
May import: types, errors, storage.textfile, log.samples, data, model, reward.
"""
