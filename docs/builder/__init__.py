"""What of the documentation is made from the sources, when the site is built and when its examples are tested."""
