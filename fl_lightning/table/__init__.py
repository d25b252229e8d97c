"""Tables: a grid of methods, settings and seeds, run by one command and put beside the published figures."""
