"""What is in nested containers, side by side."""


def flatten(state, prefix="") -> dict:
    """Nested containers as one flat dictionary of leaves."""
    if not isinstance(state, dict):
        return {prefix: state}
    return {name: leaf for key, value in state.items() for name, leaf in flatten(value, f"{prefix}/{key}").items()}
