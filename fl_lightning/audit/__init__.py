"""What a run gives away, as a number: images read off a client's message, and canaries found in the server's mean."""
