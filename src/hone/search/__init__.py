"""Search and sampling that a model's own steps are judged or chosen by."""
