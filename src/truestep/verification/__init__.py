"""Prove the steps of a distributed training loop equal to one process, or name the first thing that differs."""
