"""Runs as one self-contained HTML page: interactive figures (Vega-Lite), a table behind each, and how to run it again."""
