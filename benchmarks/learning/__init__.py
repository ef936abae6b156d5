"""What grpo_step.py and learner.py measure, by machine."""
