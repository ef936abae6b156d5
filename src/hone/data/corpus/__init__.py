"""Cleaning a pre-training corpus: filters, copies, overlap with evaluation sets, and a report of what was dropped."""
