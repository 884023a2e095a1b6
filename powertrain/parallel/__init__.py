"""Ranks at work together: what they send each other while they compute. Functions, transports and plans."""
