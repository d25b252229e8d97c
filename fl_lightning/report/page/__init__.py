"""Runs as one self-contained HTML page: figures to hover over, a table behind each, how to run it again."""
