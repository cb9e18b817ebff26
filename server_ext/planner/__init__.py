"""Answers how large the pools get, and which ratio, window and number of requests to serve with, without a GPU.

`runner`, `engine` and `weights` ask SGLang's own sizing code; the rest neither imports nor restates it.
"""
