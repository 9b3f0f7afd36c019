"""Llama-family targets in torch, and the toolkit that torch drafters share."""
